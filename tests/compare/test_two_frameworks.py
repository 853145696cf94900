"""The same model in torch and in paddle: one run tells the other apart only where the frameworks really differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_runs import sides

import tensortap as tt
from support.mirror import copy_weights, paddle_model, tokens, torch_model
from tensortap.records import Comparison

KINDS = ("input", "output", "grad_output", "param", "param_grad", "buffer")
pytest.importorskip("paddle")
pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track global mean:UserWarning")


def _train(model: Any, batch: Any, path: Path, keep: str, steps: int = 2) -> Path:
    with tt.capture(model, path, keep=keep, kinds=KINDS) as tap:
        for _ in range(steps):
            model(batch).square().sum().backward()
            tap.step()
    return path


@pytest.fixture(scope="module", params=["tensors", "summary"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    import paddle
    import torch

    folder, keep = tmp_path_factory.mktemp("mirror"), str(request.param)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ours = torch_model()
    theirs = paddle_model()
    copy_weights(ours, theirs)
    reference = _train(ours, torch.from_numpy(tokens()), folder / "torch", keep)
    return reference, _train(theirs, paddle.to_tensor(tokens()), folder / "paddle", keep)


@pytest.fixture(scope="module")
def result(runs: tuple[Path, Path]) -> Comparison:
    return tt.compare(*runs)


def test_what_both_frameworks_say_goes_together(result: Comparison) -> None:
    assert len(result) > 100
    assert result.counts.get("unmatched", 0) < len(result) / 4
    assert (result.info["reference"]["framework"], result.info["candidate"]["framework"]) == ("torch", "paddle")


def test_only_matrices_that_lie_the_other_way_have_another_shape(result: Comparison) -> None:
    turned = [row for row in result.rows if row["status"] == "shape"]
    assert turned
    for row in turned:
        assert row["shape_reference"] == row["shape_candidate"][::-1]
        assert (row["cls"], row["path"]) == ("Linear", "weight")


def test_what_one_framework_has_no_name_for_is_reported(result: Comparison) -> None:
    """Paddle's BatchNorm calls its statistics otherwise, and does not count its batches."""
    ours = {(u.key.kind, u.key.path) for u in result.unmatched if u.side == "reference"}
    assert ("buffer", "running_mean") in ours
    assert set(sides(result)["reference"]) <= {"norm"} | set(sides(result)["candidate"])


def test_the_forward_pass_agrees(runs: tuple[Path, Path]) -> None:
    result = tt.compare(*runs, kinds=("input", "output"), steps=[0])
    assert (result.verdict, result.unmatched) == ("match", []), str(result)
    assert result.counts["close"] > 5, "other kernels, other rounding"


def test_the_backward_pass_agrees(runs: tuple[Path, Path]) -> None:
    result = tt.compare(*runs, kinds=("input", "output", "grad_output"), steps=[0])
    assert result.verdict == "match", str(result)


def test_the_other_way_round(runs: tuple[Path, Path], result: Comparison) -> None:
    back = tt.compare(*runs[::-1])
    assert (back.verdict, len(back), len(back.unmatched)) == (result.verdict, len(result), len(result.unmatched))

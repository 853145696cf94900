"""The same model in torch and in paddle: runs differ only where the frameworks differ by design."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tensortap as tt
from support.mirror import copy_weights, paddle_model, tokens, torch_model
from tensortap.core.records import Comparison

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


def test_records_of_both_frameworks_are_paired(result: Comparison) -> None:
    assert len(result) > 100
    assert result.counts.get("unmatched", 0) < len(result) / 4
    assert (result.info["reference"]["framework"], result.info["candidate"]["framework"]) == ("torch", "paddle")


def test_transposed_matrices_are_read_in_the_references_layout(result: Comparison) -> None:
    turned = [row for row in result.rows if row["layout"] is not None]
    assert {(row["cls"], row["path"], row["layout"]) for row in turned} == {("Linear", "weight", "transposed")}
    for row in turned:
        assert row["shape_reference"] == row["shape_candidate"][::-1]
        assert row["status"] in (("equal", "close") if row["exact"] else ("unjudged",)), row


def test_a_summary_of_another_layout_is_not_judged_right(result: Comparison) -> None:
    bounded = [row for row in result.rows if row["layout"] is not None and not row["exact"]]
    for row in bounded:
        assert (row["status"], row["rule"]) == ("unjudged", "only norms and counts: another layout")
        assert row["l2_reference"] == pytest.approx(row["l2_candidate"], rel=1e-6)
    assert any("shows only norms and counts" in note for note in result.notes) == bool(bounded)


def test_tensors_of_one_framework_alone_are_listed(result: Comparison) -> None:
    """Paddle's BatchNorm has other names for its statistics, and does not count batches."""
    assert not result.unmatched
    statistics = {(row["path"], row["path_candidate"]) for row in result.rows if row["kind"] == "buffer"}
    assert statistics == {("running_mean", "_mean"), ("running_var", "_variance")}
    assert result.mapping is not None
    assert [(each.side, each.name) for each in result.mapping.ignored] == [("reference", "norm.num_batches_tracked")]


def test_the_runs_match(result: Comparison) -> None:
    assert result.verdict == "match", str(result)


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

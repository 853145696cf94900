"""Files of a peek and of scripts' hooks open as runs and are compared, within and between frameworks."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import torch
from torch import nn

import tensortap as tt
from support import mirror, zoo
from tensortap.compat.gradients import save_gradients_and_inputs

MODULE = "blocks.1.fc1"
pytestmark = pytest.mark.filterwarnings(
    "ignore:When training, we now always track", "ignore:Full backward hook is firing"
)


def model_of(framework: str, scale: float = 1.0) -> Any:
    torch.manual_seed(0)
    model = mirror.torch_model()
    with torch.no_grad():
        model.blocks[1].fc1.weight *= scale
    if framework == "torch":
        return model
    other = mirror.paddle_model()
    mirror.copy_weights(model, other)
    return other


def train(framework: str, model: Any) -> None:
    tokens = mirror.tokens()
    model(torch.from_numpy(tokens) if framework == "torch" else paddle.to_tensor(tokens)).square().mean().backward()


def peeked(path: Path, framework: str, scale: float = 1.0) -> Path:
    model = model_of(framework, scale)
    with tt.peek(model, MODULE, times=1, save=path, file=io.StringIO()):
        train(framework, model)
    return path


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_peek_opens_as_a_run(tmp_path: Path, framework: str) -> None:
    run = tt.open(peeked(tmp_path / "a.npz", framework))
    kinds = ["input", "output", "grad_output", "grad_input"]
    assert [(r.key.module, r.key.kind, r.cls) for r in run] == [(MODULE, kind, "Linear") for kind in kinds]
    assert run.info["framework"] == framework and run.notices == []


@pytest.mark.parametrize("ours", ["torch", "paddle"])
@pytest.mark.parametrize("theirs", ["torch", "paddle"])
def test_the_module_or_its_inputs(tmp_path: Path, ours: str, theirs: str) -> None:
    gpu = peeked(tmp_path / "gpu.npz", ours)
    assert tt.compare(gpu, peeked(tmp_path / "cpu.npz", theirs)).verdict == "match"
    result = tt.compare(gpu, peeked(tmp_path / "wrong.npz", theirs, scale=1.1))
    assert result.verdict == "diverged" and len(result) == 4
    assert f"The runs part in {MODULE} (Linear" in str(result) and "its inputs match" in str(result)


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_peek_compares_with_a_run(tmp_path: Path, framework: str) -> None:
    model = model_of(framework)
    kinds = ("input", "output", "grad_output", "grad_input")
    with tt.capture(model, tmp_path / "run", keep="tensors", kinds=kinds, modules=MODULE) as tap:
        train(framework, model)
        tap.step()
    result = tt.compare(tmp_path / "run", peeked(tmp_path / "a.npz", framework))
    assert result.verdict == "match" and len(result) == 4 and not result.unmatched


def test_odd_and_long_module_names_have_files_of_their_own(tmp_path: Path) -> None:
    names = ["a b", "a_b", "täp/1", "x" * 300]
    model = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names))
    with tt.peek(model, ["(root)", "*"], times=1, save=tmp_path / "p.npz", quiet=True):
        model(torch.ones(1, 2)).sum().backward()
    short, long = [], []
    for file in tmp_path.iterdir():
        (long if len(file.name) > 100 else short).append(file.name)
    assert sorted(short) == ["p.(root).npz", "p.a b.npz", "p.a_b.npz", "p.täp%2F1.npz"]
    assert len(long) == 1 and {r.key.module for r in tt.open(tmp_path / long[0])} == {"x" * 300}


def test_paths_of_keywords_and_structures_are_read_back(tmp_path: Path) -> None:
    def saved(path: Path) -> Path:
        torch.manual_seed(0)
        model = zoo.Structured()
        with tt.peek(model, "inner", times=1, save=path, file=io.StringIO()):
            zoo.loss_of(model(zoo.batch())).backward()
        return path

    run = tt.open(saved(tmp_path / "a.npz"))
    paths = {(record.key.kind, record.key.path) for record in run}
    assert {("input", "scale"), ("output", "extra.pair.left"), ("grad_output", "extra.pair.left")} <= paths
    assert tt.compare(run.path, saved(tmp_path / "b.npz")).verdict == "match"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_read_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(dtype)
    x = torch.tensor([[1.0, float("nan"), float("inf"), -0.0]], dtype=dtype)
    with tt.peek(model, "0", times=1, save=tmp_path / "a.npz", file=io.StringIO()):
        model(x).sum().backward()
    run = tt.open(tmp_path / "a.npz")
    record = next(run.records(kind="input"))
    assert torch.equal(run.torch(record).view(torch.int16), x.view(torch.int16))
    assert {str(run.torch(each).dtype) for each in run} == {str(dtype)}


def test_the_hooks_of_scripts(tmp_path: Path) -> None:
    """Today's hooks, those of the script before them, and a peek at the same module save the same call."""
    model = model_of("torch")
    module = model.blocks[1].fc1
    kept: dict[str, Any] = {}
    forward_hook, backward_hook = save_gradients_and_inputs("fc1", tmp_path, quiet=True)
    handles = [module.register_forward_hook(forward_hook), module.register_full_backward_hook(backward_hook)]
    handles += [
        module.register_forward_hook(lambda m, i, o: kept.update(input=i[0], output=o)),
        module.register_full_backward_hook(lambda m, i, o: kept.update(grad_input=i[0], grad_output=o[0])),
    ]
    train("torch", model)
    np.savez(tmp_path / "old.npz", **{name: tensor.detach().numpy() for name, tensor in kept.items()})
    ours = tmp_path / "gradients_and_inputs_fc1.npz"
    assert {(record.key.module, record.cls) for record in tt.open(ours)} == {("fc1", "Linear")}
    for theirs in (tmp_path / "old.npz", peeked(tmp_path / "peek.npz", "torch")):
        result = tt.compare(ours, theirs)
        assert result.verdict == "match" and result.counts["equal"] == 4 and not result.unmatched

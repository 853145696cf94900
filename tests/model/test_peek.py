"""A peek prints tensors for a few calls, writes them if requested, and removes its hooks."""

from __future__ import annotations

import copy
import inspect
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import torch
from torch import nn

from support import mirror, zoo
from support.tapping import hooks_on
from tensortap.errors import TensortapError, UsageError
from tensortap.model.peek import peek


class DownBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, 2, 1)
        self.b = nn.Sequential(
            *(nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(4, width), nn.SiLU()),
            *(nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(4, width), nn.SiLU()),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return x + self.b(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 8, 3, 1, 1)
        self.down_blk, self.down_blk2 = DownBlock(8), DownBlock(8)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_blk2(self.down_blk(self.proj(x)))


def step(model: nn.Module) -> None:
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()


def test_every_kind_is_printed_a_few_times_and_then_hooks_are_removed() -> None:
    torch.manual_seed(0)
    model, out = Net(), io.StringIO()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    handle = peek(model, "down_blk2.b.4", times=2, file=out)
    for _ in range(4):
        step(model)
    text = out.getvalue()
    assert handle.done and hooks_on(model) == 0  # without close()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    for kind in ("input 0", "output 0", "grad_output 0", "grad_input 0"):
        assert len(re.findall(rf"^  {kind}\s+Tensor f32 2×8×2×2", text, re.M)) == 2
    assert re.findall(r"call (\d) of 2 · (\w+)", text) == [
        *(("1", "forward"), ("1", "backward"), ("2", "forward"), ("2", "backward")),
    ]
    assert all(len(line) <= 80 for line in text.splitlines())
    handle.close()
    handle.close()
    assert out.getvalue() == text


def test_a_name_of_a_list_that_matches_nothing_is_reported() -> None:
    model, out = Net(), io.StringIO()
    handle = peek(model, ["proj", "down_blk2.b.9"], times=1, file=out)
    text = "modules: 'down_blk2.b.9' matches no module of the model; did you mean down_blk2.b"
    assert " ".join(out.getvalue().split()).startswith(f"! {text}")
    assert len(handle.notices) == 1 and handle.notices[0].startswith(text)
    handle.close()


def test_the_root_itself() -> None:
    model, out = Net(), io.StringIO()
    handle = peek(model, "(root)", times=2, file=out)
    for _ in range(4):
        step(model)
    assert handle.done and hooks_on(model) == 0 and "forward" not in vars(model)
    assert out.getvalue().count("\n  output 0") == out.getvalue().count("\n  grad_output 0") == 2


def test_numbers_and_nonfinite_values() -> None:
    out = io.StringIO()
    model = nn.Sequential(nn.Identity())
    values = torch.tensor([[1.0, -2.0], [float("nan"), float("inf")]])
    with peek(model, "0", kinds="input", file=out):
        model(values)
    text = out.getvalue()
    assert "min -2.000  max 1.000  mean -0.5000" in text and "1 nan 1 +inf" in text
    assert "[     1.000     -2.000]" in text and "nan        inf" in text
    with peek(model, "0", kinds="input", file=out):
        model(torch.tensor([3, 17]))
        model(torch.zeros(0, 4))
    assert "i64 2   min 3  max 17  mean 10.00" in out.getvalue() and "0×4   no elements" in out.getvalue()


@pytest.mark.parametrize("kind", ["input", "output", "grad_input", "grad_output"])
def test_one_kind_alone(kind: str) -> None:
    model, out = Net(), io.StringIO()
    handle = peek(model, "down_blk.conv", kinds=[kind], times=2, file=out)
    for _ in range(5):
        step(model)
    assert handle.done and hooks_on(model) == 0
    assert re.findall(r"^  (\w+) 0", out.getvalue(), re.M) == [kind, kind]


def test_missing_values_are_reported_at_close() -> None:
    model, out = Net(), io.StringIO()
    model.proj.requires_grad_(False)
    with peek(model, ["unused", "proj"], file=out), torch.no_grad():
        model(torch.randn(1, 3, 8, 8))
    assert "! unused: never ran" in out.getvalue()
    assert "! proj: no gradient: ran with autograd off" in out.getvalue()
    assert hooks_on(model) == 0


def test_names_globs_predicates_and_shared_modules() -> None:
    def seen(modules: Any, model: nn.Module, *inputs: torch.Tensor) -> set[str]:
        out = io.StringIO()
        with peek(model, modules, kinds=("output",), times=1, file=out):
            model(*inputs)
        return set(re.findall(r"^(\S+) · ", out.getvalue(), re.M))

    x = torch.randn(1, 3, 8, 8)
    assert seen("down_blk*.conv", Net(), x) == {"down_blk.conv", "down_blk2.conv"}
    assert seen(lambda name, module: isinstance(module, nn.SiLU), Net(), x) >= {"down_blk.b.2", "down_blk2.b.5"}
    assert seen("(root)", Net(), x) == {"(root)"}
    assert seen("again", zoo.Shared(), zoo.batch()) == {"layer"}
    with pytest.raises(UsageError, match="did you mean"):
        peek(Net(), "down_blk2.c.4")
    with pytest.raises(UsageError, match="does not flow"):
        peek(Net(), "proj", kinds=("param",))
    with pytest.raises(UsageError, match="times"):
        peek(Net(), "proj", times=0)


def test_the_other_rank_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for rank, speaks in ((0, False), (1, True), (None, True)):
        model, out = Net(), io.StringIO()
        with peek(model, "proj", rank=rank, file=out):
            assert bool(hooks_on(model)) == speaks
            step(model)
        assert bool(out.getvalue()) == speaks


def test_one_file_per_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    grads: list[Any] = []
    model.down_blk2.b[4].register_full_backward_hook(lambda m, i, o: grads.append((i[0].clone(), o[0].clone())))
    with peek(model, "down_blk2.b.4", times=2, save=tmp_path / "file.npz", file=io.StringIO()):
        step(model)
        step(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.1.npz", "file.npz"]
    for name, (grad_input, grad_output) in zip(("file.npz", "file.1.npz"), grads, strict=True):
        data = np.load(tmp_path / name, allow_pickle=False)
        assert set(data) == {"input", "output", "grad_input", "grad_output", "dtypes"}
        np.testing.assert_array_equal(data["grad_input"], grad_input)
        np.testing.assert_array_equal(data["grad_output"], grad_output)
    with peek(model, ["proj", "down_blk.conv"], times=1, save=tmp_path / "file.npz", file=io.StringIO()):
        step(model)
    assert "grad_input" not in np.load(tmp_path / "file.proj.npz", allow_pickle=False)  # a first layer
    assert "grad_input" in np.load(tmp_path / "file.down_blk.conv.npz", allow_pickle=False)


def test_a_calls_file_is_written_before_the_next_call_ends(tmp_path: Path) -> None:
    model = Net()
    with peek(model, "proj", times=3, save=tmp_path / "file", file=io.StringIO()):
        step(model)
        step(model)
        assert (tmp_path / "file.npz").exists()


def test_keyword_arguments_and_structured_outputs_by_name(tmp_path: Path) -> None:
    model = zoo.Structured()
    with peek(model, "inner", times=1, save=tmp_path / "inner.npz", file=io.StringIO()):
        zoo.loss_of(model(zoo.batch())).backward()
    names = set(np.load(tmp_path / "inner.npz", allow_pickle=False))
    assert {"input", "input_scale", "output", "output_extra.pair.left", "grad_output_extra.pair.left"} <= names


def test_bfloat16_is_written_as_float32(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    with peek(model, "1", times=1, save=tmp_path / "b.npz", file=io.StringIO()):
        model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
    data = np.load(tmp_path / "b.npz", allow_pickle=False)
    assert data["grad_input"].dtype == np.float32
    assert json.loads(str(data["dtypes"]))["grad_input"] == "bfloat16"


def test_a_missing_folder_raises_at_once(tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(TensortapError, match="no folder"):
        peek(model, "proj", save=tmp_path / "none" / "f.npz")
    assert hooks_on(model) == 0 and "forward" not in vars(model)


def test_peeking_is_bit_identical(tmp_path: Path) -> None:
    def run(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net()
        handle = peek(model, "*", times=2, save=tmp_path / "x.npz", file=io.StringIO()) if watched else None
        for _ in range(3):
            step(model)
        if handle is not None:
            handle.close()
        return [p.grad for p in model.parameters() if p.grad is not None] + [torch.rand(3)]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_signature_copies_and_errors_in_forward() -> None:
    model, out = Net(), io.StringIO()
    with pytest.raises(RuntimeError), peek(model, "proj", file=out):
        assert list(inspect.signature(model.forward).parameters) == ["x"]
        step(copy.deepcopy(model))
        assert out.getvalue() == ""
        model(torch.randn(1, 5, 8, 8))
    assert hooks_on(model) == 0 and "forward" not in vars(model)


def test_an_output_that_is_never_used_does_not_hold_the_peek_open() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b(x)
            return self.a(x)

    model, out = Aside(), io.StringIO()
    handle = peek(model, "b", times=1, file=out)
    for _ in range(12):
        model(torch.ones(1, 4)).sum().backward()
    assert handle.done and hooks_on(model) == 0
    assert "b: no gradient: backward did not reach it" in out.getvalue()


@pytest.mark.filterwarnings("ignore:When training, we now always track")
@pytest.mark.parametrize("module", ["blocks.0.fc1", "(root)"])
def test_paddle(tmp_path: Path, module: str) -> None:
    model, out = mirror.paddle_model(), io.StringIO()
    handle = peek(model, module, times=2, save=tmp_path / "p.npz", file=out)
    for _ in range(4):
        model(paddle.to_tensor(mirror.tokens())).square().mean().backward()
    assert handle.done and "forward" not in vars(model)
    layers = model.sublayers(include_self=True)
    assert not any(len(layer._forward_pre_hooks) + len(layer._forward_post_hooks) for layer in layers)
    assert out.getvalue().count("output 0") == 4  # with grad_output
    data = np.load(tmp_path / "p.1.npz", allow_pickle=False)
    assert {"input", "output", "grad_output"} <= set(data)
    assert ("grad_input" in data) == (module != "(root)")


def test_two_peeks_and_a_compiled_part() -> None:
    model, first, second = Net(), io.StringIO(), io.StringIO()
    one = peek(model, "proj", times=1, file=first)
    two = peek(model, "proj", times=2, file=second)
    for _ in range(4):
        step(model)
    assert one.done and two.done and hooks_on(model) == 0 and "forward" not in vars(model)
    assert first.getvalue().count("\n  output 0") == 1 and second.getvalue().count("\n  output 0") == 2
    out = io.StringIO()
    with peek(torch.compile(model, backend="eager"), ["proj", "(root)"], times=1, file=out):
        pass
    assert "! proj: runs inside the compiled graph of (root)" in out.getvalue()

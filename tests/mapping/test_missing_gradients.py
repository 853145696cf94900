"""Gradients that one side alone has, where names are mapped: a divergence in both directions, as within one tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tensortap as tt
from tensortap.cli import app

paddle = pytest.importorskip("paddle")
from support import twins  # noqa: E402 - it needs paddle

DEFAULT = ("input", "output", "grad_output", "param_grad")
ALL = (*DEFAULT, "grad_input", "param", "buffer")
X = np.random.default_rng(0).standard_normal((3, 7, 5)).astype(np.float32)
WRONG = ["parameter", "block", "cut"]
Make = Callable[[bool], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(5, 8), nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 4)
        self._cut = cut

    def forward(self, x: Any) -> Any:
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        return self.head(self.blocks[2](x.detach() if self._cut else x))


class Renamed(nn.Module):
    """The same under other names."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        net = Net()
        self.embed, self.layers, self.out = net.stem, net.blocks, net.head
        self._cut = cut

    def forward(self, x: Any) -> Any:
        x = self.layers[1](self.layers[0](self.embed(x)))
        return self.out(self.layers[2](x.detach() if self._cut else x))


class PaddleBlock(paddle.nn.Layer):  # type: ignore[misc]  # paddle is untyped to us
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = paddle.nn.LayerNorm(8), paddle.nn.GELU()
        self.up, self.down = paddle.nn.Linear(8, 12), paddle.nn.Linear(12, 8)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.act(self.up(self.norm(x))))


class PaddleNet(paddle.nn.Layer):  # type: ignore[misc]
    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.stem, self.head = paddle.nn.Linear(5, 8), paddle.nn.Linear(8, 4)
        self.blocks = paddle.nn.LayerList([PaddleBlock() for _ in range(3)])
        self._cut = cut

    def forward(self, x: Any) -> Any:
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        return self.head(self.blocks[2](x.detach() if self._cut else x))


def freeze(model: Any, wrong: str) -> None:
    for name, parameter in model.named_parameters():
        if (wrong == "parameter" and name.endswith(".1.up.weight")) or (wrong == "block" and ".1." in f".{name}"):
            if isinstance(parameter, torch.Tensor):
                parameter.requires_grad_(False)
            else:
                parameter.stop_gradient = True


def ran(path: Path, make: Make, wrong: str, kinds: Sequence[str], keep: str) -> Path:
    torch.manual_seed(0)
    weights, model = Net(), make(wrong == "cut")
    assert tt.transfer(weights, model, {}).complete
    freeze(model, wrong)
    return twins.train(model, X, path, kinds=kinds, keep=keep)


SIDES = [
    pytest.param(Net, PaddleNet, None, id="torch and paddle"),
    pytest.param(PaddleNet, Net, None, id="paddle and torch"),
    pytest.param(Net, Renamed, {}, id="other names"),
    pytest.param(Net, Net, {}, id="the same names"),
]


@pytest.mark.parametrize("keep", ["tensors", "summary"])
@pytest.mark.parametrize("kinds", [DEFAULT, ALL], ids=["default", "all"])
@pytest.mark.parametrize(("ours", "theirs", "mapping"), SIDES)
def test_gradients_of_one_side_alone(
    tmp_path: Path, ours: Make, theirs: Make, mapping: Any, kinds: Sequence[str], keep: str
) -> None:
    right = ran(tmp_path / "a", ours, "", kinds, keep), ran(tmp_path / "b", theirs, "", kinds, keep)
    assert tt.compare(*right, mapping=mapping).verdict == "match"
    for wrong in WRONG:
        for side, make in enumerate((ours, theirs)):
            path = ran(tmp_path / f"{wrong} {side}", make, wrong, kinds, keep)
            pair = (path, right[1]) if side == 0 else (right[0], path)
            result = tt.compare(*pair, mapping=mapping)
            births = {(birth.status, birth.key.module) for birth in result.births}
            assert result.verdict == "diverged", (wrong, side, result.sentence)
            if wrong == "parameter":
                assert births >= {("extra" if side == 0 else "missing", "blocks.1.up")}
                assert result.first is not None and result.first.key.path == "weight"
            else:
                assert {status for status, _ in births} >= {"extra" if side == 0 else "missing"}


def test_the_command_ends_with_1(tmp_path: Path) -> None:
    ours = ran(tmp_path / "a", Net, "", DEFAULT, "tensors")
    theirs = ran(tmp_path / "b", PaddleNet, "parameter", DEFAULT, "tensors")
    for pair in ((ours, theirs), (theirs, ours)):
        assert CliRunner().invoke(app, ["compare", *map(str, pair), "--quiet"]).exit_code == 1


def test_the_sentence_has_both_names(tmp_path: Path) -> None:
    ours = ran(tmp_path / "a", Net, "", DEFAULT, "tensors")
    theirs = ran(tmp_path / "b", Renamed, "parameter", DEFAULT, "tensors")
    expected = "in step 0 the gradient of blocks.1.up's parameter weight never comes, though the reference has it"
    also = "(blocks.1.up is layers.1.up in the candidate)"
    assert tt.compare(ours, theirs, mapping={}).sentence == f"The forward pass agrees, but {expected} {also}."


def test_each_side_freezes_another_block(tmp_path: Path) -> None:
    """Neither side's gradients explain where the other's are."""
    for name, block in (("a", 0), ("b", 2)):
        torch.manual_seed(0)
        model = Net()
        model.blocks[block].requires_grad_(False)
        twins.train(model, X, tmp_path / name, kinds=DEFAULT)
    births = tt.compare(tmp_path / "a", tmp_path / "b").births
    assert {(birth.status, birth.key.module[:8]) for birth in births} == {
        ("missing", "blocks.2"),
        ("extra", "blocks.0"),
    }
    assert tt.compare(tmp_path / "a", tmp_path / "b", mapping={}).verdict == "diverged"


def test_renamed_modules_that_get_a_gradient_they_should_not(tmp_path: Path) -> None:
    ours = ran(tmp_path / "a", Net, "parameter", DEFAULT, "tensors")
    theirs = ran(tmp_path / "b", Renamed, "", DEFAULT, "tensors")
    rename = [r"^embed=stem", r"^layers\.=blocks.", r"^layers$=blocks", r"^out$=head"]
    result = tt.compare(ours, theirs, rename=rename)
    assert result.first is not None and result.first.status == "extra"
    assert (result.first.key.module, result.first.key.path) == ("blocks.1.up", "weight")


# --- right, though a gradient has no counterpart ----------------------------------------------------------------------
class Inner(nn.Module):
    """A Linear whose weight is kept in a part of it, as parametrizations do."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.holder = nn.ParameterDict({"original": linear.weight})
        self.bias = linear.bias

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.holder["original"], self.bias)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("mapping", [None, {}])
def test_a_parameter_that_is_kept_in_a_part_of_the_module(tmp_path: Path, mapping: Any, back: bool) -> None:
    for name in "ab":
        torch.manual_seed(0)
        model = Net()
        if name == "b":
            model.blocks[1].up = Inner(model.blocks[1].up)  # type: ignore[assignment]
        twins.train(model, X, tmp_path / name, kinds=DEFAULT)
    pair = (tmp_path / "b", tmp_path / "a") if back else (tmp_path / "a", tmp_path / "b")
    result = tt.compare(*pair, mapping=mapping)
    assert result.verdict == "match", result.sentence


def test_a_guessed_counterpart_carries_no_verdict(tmp_path: Path) -> None:
    """Two modules that look alike and get the same input, under other names, and nothing confirms which is which."""

    class Ways(nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.names, self.head = names, nn.Linear(8, 4)
            parts = {name: nn.Linear(5, 8) for name in sorted(names)}
            for name in names:
                self.add_module(name, parts[name])

        def forward(self, x: Any) -> Any:
            return self.head(sum(self.get_submodule(name)(x) for name in sorted(self.names)))

    for path, names, frozen in (("a", "pq", ""), ("b", "vu", "u")):
        model = Ways(names)
        for parameter in model.get_submodule(frozen).parameters() if frozen else ():
            parameter.requires_grad_(False)
        # Without outputs' elements and without parameters, nothing shows which is which.
        twins.train(model, X, tmp_path / path, kinds=("input", "output", "param_grad"), keep="summary")
    result = tt.compare(tmp_path / "a", tmp_path / "b", mapping={})
    assert result.verdict == "incomparable"
    assert "Paired by structure alone, and different" in result.sentence

"""Modules paired only by structure: they determine no verdict alone, and hide no mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("paddle")
import paddle

import tensortap as tt
from support import twins
from tensortap.cli import app

ROWS = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)


class Mlp(nn.Module):
    """Drops out at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.0)

    def forward(self, x: Any) -> Any:
        return self.drop(self.down(torch.relu(self.up(x))))


class Block(nn.Module):
    """The residual is added outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Mlp()

    def forward(self, x: Any) -> Any:
        return self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block(), Block()]), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class Layer(paddle.nn.Layer):  # type: ignore[misc]  # paddle is untyped to us
    """Adds the residual itself, and drops out in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.linear1, self.linear2 = paddle.nn.LayerNorm(8), paddle.nn.Linear(8, 16), paddle.nn.Linear(16, 8)
        self.dropout = paddle.nn.Dropout(0.0)
        self.scale = 1.0

    def forward(self, x: Any) -> Any:
        y = self.dropout(paddle.nn.functional.relu(self.linear1(self.ln(x))))
        return x + self.scale * self.linear2(y)


class PaddleNet(paddle.nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = paddle.nn.LayerList([Layer(), Layer()])
        self.head = paddle.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.out(torch.tanh(self.left(x)) * self.right(x))


class PaddleBranches(paddle.nn.Layer):  # type: ignore[misc]
    """The branches run in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.last = paddle.nn.Linear(8, 8), paddle.nn.Linear(8, 8), paddle.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        value = self.value(x)
        return self.last(paddle.tanh(self.gate(x)) * value)


def runs(
    folder: Path, models: tuple[type, type], change: Callable[[Any], None] | None = None, seed: int = 0, **options: Any
) -> list[Path]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ours, theirs = (model() for model in models)
    assert tt.transfer(ours, theirs).complete
    if change is not None:
        change(theirs)
    return [twins.train(m, ROWS, folder / str(at), **options) for at, m in enumerate((ours, theirs))]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("back", [False, True], ids=["torch first", "paddle first"])
def test_a_correct_port_matches_despite_wrong_guesses(back: bool, seed: int, tmp_path: Path) -> None:
    both = runs(tmp_path, (Net, PaddleNet), seed=seed)
    result = tt.compare(*(both[::-1] if back else both))
    assert result.verdict == "match", str(result)
    guessed = [row for row in result.rows if row["rule"] == "paired by structure alone, and nothing confirms it"]
    assert guessed and all(row["status"] == "unjudged" for row in guessed)
    assert "could not be judged" in str(result)
    assert result.notes[0].startswith("paired by structure alone, and different: ")
    assert result.notes[0].endswith("say so with --map")


@pytest.mark.parametrize("back", [False, True], ids=["torch first", "paddle first"])
def test_parameters_correct_wrong_pairs(back: bool, tmp_path: Path) -> None:
    """Two similar branches run in another order: all differing pairs are wrong, and are paired again."""
    both = runs(tmp_path, (Branches, PaddleBranches))
    result = tt.compare(*(both[::-1] if back else both))
    assert result.verdict == "match" and not result.counts.get("unjudged"), str(result)
    by_values = {(each.reference, each.candidate) for each in result.mapping.modules if each.how == "values"}
    assert by_values == ({("gate", "left"), ("value", "right")} if back else {("left", "gate"), ("right", "value")})


def test_a_rule_decides(tmp_path: Path) -> None:
    both = runs(tmp_path, (Branches, PaddleBranches))
    names = {"left": "gate", "right": "value"}
    rules = {"module": [{"torch": ours, "paddle": theirs} for ours, theirs in names.items()]}
    result = tt.compare(*both, mapping=rules)
    assert result.verdict == "match" and not result.counts.get("unjudged"), str(result)


def _scale(model: Any) -> None:
    model.layers[1].scale = 1.01


def _weight(model: Any) -> None:
    model.layers[0].linear2.weight.set_value(model.layers[0].linear2.weight * 1.01)


def _epsilon(model: Any) -> None:
    model.layers[1].ln._epsilon = 1e-3


@pytest.mark.parametrize(
    ("change", "module"), [(_scale, "blocks.1"), (_weight, "blocks.0.mlp.down"), (_epsilon, "blocks.1.norm")]
)
def test_a_mistake_is_located_despite_wrong_guesses(change: Callable[[Any], None], module: str, tmp_path: Path) -> None:
    result = tt.compare(*runs(tmp_path, (Net, PaddleNet), change))
    assert result.verdict == "diverged", str(result)
    if module != "blocks.1":
        assert result.first.module == module, str(result)
    else:  # whose boundaries differ: the next certain record is the one that the surrounding code passes on
        assert result.first.module in ("", "blocks.1"), str(result)


def test_a_wrong_branch_is_found_at_the_next_certain_pair(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        model.gate.weight.set_value(model.gate.weight * 1.01)

    result = tt.compare(*runs(tmp_path, (Branches, PaddleBranches), change))
    assert (result.verdict, result.first.key.module) == ("diverged", "out"), str(result)


def test_without_certain_pairs_the_result_is_incomparable(tmp_path: Path) -> None:
    """Only the branches were tapped, and they are alike."""
    options = {"kinds": ("input", "output"), "modules": lambda name, module: name in ("left", "right", "gate", "value")}
    both = runs(tmp_path, (Branches, PaddleBranches), **options)
    result = tt.compare(*both)
    assert (result.verdict, result.first) == ("incomparable", None)
    assert str(result) == (
        "Cannot tell whether the runs match. Paired by structure alone, and different: left and value; right and gate. "
        "If they belong together, say so with --map."
    )
    assert CliRunner().invoke(app, ["compare", *map(str, both)]).exit_code == 3

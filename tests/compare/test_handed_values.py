"""Values that one module hands to others: tuples in place of None, outputs that nobody uses, shares of a gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt
from tensortap.core.causes import Cause
from tensortap.core.records import Comparison

WAYS = pytest.mark.parametrize("way", ["tensors", "summary", "isolated"])


def compared(path: Path, right: nn.Module, other: nn.Module, way: str) -> Comparison:
    """Run one step of both models with the same parameters, and compare them."""
    other.load_state_dict(right.state_dict())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def captured(model: nn.Module, name: str) -> Path:
        with tt.capture(model, path / name, keep="summary" if way == "summary" else "tensors"):
            model(x).square().sum().backward()
        return path / name

    reference = captured(right, "reference")
    if way != "isolated":
        return tt.compare(reference, captured(other, "candidate"))
    with tt.check(other, reference) as check:
        other(x).square().sum().backward()
    return check.result


def named(result: Comparison) -> list[tuple[str, Cause]]:
    return [(birth.module, birth.cause) for birth in result.births]


class Turned(nn.Module):
    """Turns its input by a table of cosines and sines, if it is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None = None) -> Tensor:
        y = self.fc(x)
        return y if tables is None else y * tables[0] + y.flip(-1) * tables[1]


class Turning(nn.Module):
    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.inner, self.turns = Turned(), turns

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(8.0) + x.mean() * 0
        return self.inner(x, tables=(angles.cos(), angles.sin()) if self.turns else None)


@WAYS
@pytest.mark.parametrize("turns", [True, False])
def test_none_in_place_of_a_tuple_is_the_fault_of_the_code_that_hands_it_on(
    turns: bool, way: str, tmp_path: Path
) -> None:
    result = compared(tmp_path, Turning(turns), Turning(not turns), way)
    assert named(result)[:1] == [("", Cause.LOST_INPUT if turns else Cause.EXTRA_INPUT)], result.sentence
    assert compared(tmp_path / "right", Turning(turns), Turning(turns), way).verdict == "match"


class Two(nn.Module):
    """Returns two values, each made by a module of its own from the same input."""

    def __init__(self, detaches: bool = False) -> None:
        super().__init__()
        self.one, self.other, self.detaches = nn.Linear(8, 8), nn.Linear(8, 8), detaches

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        other = self.other(x + y)
        return self.one(x + y).tanh(), (other.detach() if self.detaches else other).tanh()


class Chain(nn.Module):
    def __init__(self, uses: bool = True, detaches: bool = False) -> None:
        super().__init__()
        self.start, self.first, self.last, self.uses = nn.Linear(8, 8), Two(detaches), Two(), uses

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.first(self.start(x), 2 * x)
        one, other = self.last(one, other if self.uses else one)
        return one + other


def test_a_module_whose_output_is_not_used_is_not_at_fault(tmp_path: Path) -> None:
    result = compared(tmp_path, Chain(), Chain(uses=False), "isolated")
    assert {module for module, _ in named(result)} == {""}, result.sentence


@WAYS
def test_a_module_that_detaches_its_own_output_is_at_fault(way: str, tmp_path: Path) -> None:
    result = compared(tmp_path, Chain(), Chain(detaches=True), way)
    assert {module for module, _ in named(result)} == {"first"}, result.sentence


class InPlace(nn.Module):
    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.shift, self.out, self.adds = nn.Linear(8, 8), nn.Linear(8, 8), adds

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift(torch.ones(8))
        if self.adds:
            x += shift
        y: Tensor = self.out(x)
        return y


class ReturnsBoth(nn.Module):
    """Returns what a module has changed in place, beside what that module made of it."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.make, self.change = nn.Linear(8, 8), InPlace(adds)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.make(x)
        return self.change(made), made


class Loss(nn.Module):
    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.model = ReturnsBoth(adds)

    def forward(self, x: Tensor) -> Tensor:
        changed, _ = self.model(x)
        loss: Tensor = changed
        return loss


def test_a_value_that_was_to_be_changed_in_place_is_not_the_fault_of_the_module_that_returns_it(tmp_path: Path) -> None:
    result = compared(tmp_path, Loss(True), Loss(False), "isolated")
    assert {module for module, _ in named(result)} == {"model.change"}, result.sentence


class Tied(nn.Module):
    """Two modules share a weight; the use of one has a small share in its gradient."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.first, self.last, self.back = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight, self.last.bias = self.first.weight, self.first.bias
        self.detaches = detaches

    def forward(self, x: Tensor) -> Tensor:
        middle = self.first(x)
        middle = middle.detach() if self.detaches else middle
        y: Tensor = self.last(x + 1e-9 * self.back(middle))
        return y


@pytest.mark.parametrize("way", ["tensors", "summary"])
def test_a_share_of_a_gradient_that_never_comes_is_missed_however_small(way: str, tmp_path: Path) -> None:
    result = compared(tmp_path, Tied(False), Tied(True), way)
    assert result.first is not None and result.first.status == "missing", result.sentence
    assert result.first.module == "", result.sentence
    assert compared(tmp_path / "right", Tied(True), Tied(True), way).verdict == "match"

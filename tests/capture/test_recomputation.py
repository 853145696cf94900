"""A recomputation that makes other values than the first forward is found, in its module and in its step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from tensortap.core.causes import Cause
from tensortap.report.terminal.health import build, render


class Block(nn.Module):
    def __init__(self, in_own_code: bool) -> None:
        super().__init__()
        self.fc, self.drop, self.out = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)
        self.in_own_code = in_own_code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        x = nn.functional.dropout(x, 0.5, self.training) if self.in_own_code else self.drop(x)
        return self.out(self.out(x))


class Net(nn.Module):
    """Two checkpointed regions; the state of random numbers is kept for them, or lost."""

    def __init__(self, kept: bool, reentrant: bool, in_own_code: bool) -> None:
        super().__init__()
        self.first, self.second = Block(in_own_code), Block(in_own_code)
        self.kept, self.reentrant = kept, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=self.reentrant, preserve_rng_state=self.kept)
        return x


def run(path: Path, kept: bool, reentrant: bool, in_own_code: bool) -> Path:
    torch.manual_seed(0)
    model = Net(kept, reentrant, in_own_code)
    with tt.capture(model, path, kinds=("input", "output", "grad_output", "param_grad")) as tap:
        for _ in range(2):
            for _ in range(2):
                model(torch.randn(64, 8, requires_grad=True)).sum().backward()
            tap.step()
    return path


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("in_own_code", [False, True])
def test_a_lost_random_state_is_found_where_it_is(reentrant: bool, in_own_code: bool, tmp_path: Path) -> None:
    right, lost = (run(tmp_path / str(kept), kept, reentrant, in_own_code) for kept in (True, False))
    assert "recomputation" not in tt.open(right).loop().names()
    result = tt.compare(right, lost)
    expected = "second" if in_own_code else "second.drop"
    assert result.first is not None and result.verdict == "diverged"
    assert (result.first.module, result.first.cause, result.first.key.step) == (expected, Cause.RECOMPUTATION, 0)
    value = "input 0 of second.out" if in_own_code else "output 0"
    assert f"the recomputation in {expected}" in result.sentence and f"makes another {value} than" in result.sentence
    alone = tt.health(lost)
    assert alone.verdict == "suspicious" and alone.sentence.startswith("A recomputation differs")
    assert alone.births[0].key.module == ("second.out" if in_own_code else "second.drop")
    assert "recomputed" in "\n".join(line.plain for line in render(build(alone), 100))
    assert tt.health(right).verdict == "healthy"


def test_both_runs_may_have_it(tmp_path: Path) -> None:
    lost = run(tmp_path / "lost", False, False, False)
    result = tt.compare(lost, lost)
    assert result.verdict == "match"
    assert any("recomputation in second.drop makes other values" in note for note in result.notes)


class Region(nn.Module):
    """A part of its own code is a region. Its scale may be another one when that runs again."""

    def __init__(self, again: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scales = 2.0, again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = iter(self.scales)
        return checkpoint(lambda x: self.last(self.first(x) * next(scales)).tanh(), x, use_reentrant=False)


def step_of(model: nn.Module) -> None:
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(0))).sum().backward()


@pytest.mark.parametrize("isolated", [False, True])
def test_a_region_in_the_code_of_a_module_is_attributed_to_it(isolated: bool, tmp_path: Path) -> None:
    """The module itself is not called again when its region is."""

    def model(again: float) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Region(again))

    def captured(again: float) -> Path:
        path = tmp_path / str(again)
        with tt.capture(made := model(again), path, keep="tensors"):
            step_of(made)
        return path

    def compared(again: float) -> tt.Comparison:
        if not isolated:
            return tt.compare(tmp_path / "2.0", captured(again))
        with tt.check(made := model(again), tmp_path / "2.0") as check:
            step_of(made)
        return check.result

    captured(2.0)
    result = compared(3.0)
    assert result.first is not None, result.sentence
    assert (result.first.module, result.first.cause) == ("1", Cause.RECOMPUTATION), result.sentence
    assert isolated is False or len({birth.module for birth in result.births}) == 1, result.sentence
    if isolated:
        assert compared(2.0).verdict == "match"


class Loop(nn.Module):
    """Runs the same region twice. No input shows which of both is computed again first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(lambda y: y + self.fc(self.norm(y)).tanh(), x, use_reentrant=False)
        return x


def test_regions_that_share_their_modules_are_recomputed_in_reverse(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Loop()
    with tt.capture(model, tmp_path / "run") as tap:
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            tap.step()
    assert "recomputation" not in tt.open(tmp_path / "run").loop().names()

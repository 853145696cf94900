"""budget= records as many steps as a share of the time allows, and leaves the others almost alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensortap as tt
from support.libraries import Library
from support.zoo import loss_of
from tensortap.capture.budget import Budget
from tensortap.errors import UsageError


class Loop:
    """A training loop in simulated time. A recorded step takes `own` seconds in the tap and `beside` elsewhere, any
    other step `between` seconds in the tap."""

    def __init__(
        self,
        share: float,
        step: float = 0.1,
        own: float = 0.02,
        beside: float = 0.0,
        start: float = 0.0,
        between: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.step, self.own, self.beside, self.between = step, own, beside, between
        self.tap_seconds = start
        self.budget = Budget(share, clock=lambda: self.now)
        self.now += start
        self.recorded: list[int] = []
        self._number = 0
        self._listening = self.budget.wants(0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += self.step
            if self._listening:
                self.recorded.append(self._number)
                self.now += self.own + self.beside
                self.tap_seconds += self.own
            else:
                self.now += self.between
                self.tap_seconds += self.between
            self.budget.end_step(self._listening, self.tap_seconds)
            self._number += 1
            self._listening = self.budget.wants(self._number)

    @property
    def share(self) -> float:
        return 1 - self.step * self._number / self.now


@pytest.mark.parametrize(("own", "beside"), [(0.02, 0.0), (0.02, 0.04), (0.3, 0.0), (0.001, 0.0), (1.0, 0.5)])
def test_the_share_is_kept_whatever_a_step_costs(own: float, beside: float) -> None:
    loop = Loop(0.02, own=own, beside=beside)
    loop.run(20_000)
    assert loop.share <= 0.0205
    assert loop.share >= 0.0095 or len(loop.recorded) == 20_000 - 4  # all but 1, 2, 3 and 5, or so
    assert loop.budget.spent == pytest.approx(0.1 * 20_000 * loop.share / (1 - loop.share), rel=0.05)


def test_the_start_is_paid_for_before_the_full_share_is_used() -> None:
    loop = Loop(0.02, own=0.02, start=5.0)
    loop.run(200)
    assert loop.recorded == [0, 4]
    loop.run(2800)
    assert 0.018 <= loop.share <= 0.0205 and 2400 < loop.recorded[2] < 2600  # 5 seconds are 2 % of 2,500 steps
    loop.run(20_000)
    assert loop.share <= 0.0205
    assert loop.recorded[-1] - loop.recorded[-2] == 16


def test_two_runs_of_different_speed_record_common_steps() -> None:
    fast, slow = Loop(0.02, step=0.1, own=0.03), Loop(0.02, step=0.011, own=0.03)
    for loop in (fast, slow):
        loop.run(5000)
    assert len(slow.recorded) > 10
    assert set(slow.recorded) < set(fast.recorded)


def test_steps_that_are_not_recorded_cost_something_too() -> None:
    loop = Loop(0.02, step=0.01, own=0.02, between=0.0001)
    loop.run(20_000)
    assert 0.0095 + 0.01 <= loop.share <= 0.0205
    loop = Loop(0.02, step=0.01, own=0.02, between=0.0003)  # more than the budget
    loop.run(20_000)
    assert loop.recorded == [0, 4]


def test_a_loop_that_becomes_slower_records_more_often() -> None:
    loop = Loop(0.02, step=0.01, own=0.02)
    loop.run(2000)
    before = len(loop.recorded)
    loop.step = 0.2
    loop.run(2000)
    assert len(loop.recorded) - before > 5 * before


class Timeline:
    """A device that runs behind the host: the time of step n is known when step n + 2 has ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def mark(self, at: float) -> Any:
        self.at.append(at)
        return _Mark(self, len(self.at) - 1)


class _Mark:
    def __init__(self, timeline: Timeline, number: int) -> None:
        self.timeline, self.number = timeline, number

    def seconds_to(self, later: Any) -> float | None:
        at = self.timeline.at
        return at[later.number] - at[self.number] if later.number < len(at) - 1 else None


@pytest.mark.parametrize(("own", "beside"), [(0.05, 0.01), (0.0, 0.02)])
def test_on_a_device_only_its_own_time_counts(own: float, beside: float) -> None:
    """Host time that the device does not wait for is free; device time that no hook sees is not."""
    timeline, loop = Timeline(), Loop(0.02, own=0.0, beside=beside)
    loop.budget = Budget(0.02, lambda: timeline.mark(loop.now), clock=lambda: loop.now)
    loop.tap_seconds += own

    loop.run(5000)
    assert 0.0095 <= loop.share <= 0.0205


@pytest.mark.parametrize("budget", [0, 1, -0.1, "2%", True, float("nan")])
def test_a_budget_is_a_share_of_the_time(budget: Any) -> None:
    with pytest.raises(UsageError, match="is not a share of the time"):
        tt.capture(torch.nn.Linear(2, 2), budget=budget)


@pytest.fixture
def every_fourth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "interval", property(lambda self: 4))
    monkeypatch.setattr(Budget, "_is_affordable", True)


@pytest.mark.filterwarnings("ignore::UserWarning:paddle", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_unrecorded_steps_have_no_hooks_and_training_is_unchanged(
    name: str, tmp_path: Path, every_fourth: None
) -> None:
    library = Library(name)
    plain, model = library.model(), library.model()
    expected = library.train(plain, steps=10)
    optimizer = library.optimizer(model)
    hooks: list[int] = []
    with tt.capture(model, tmp_path / "run", optimizer=optimizer, budget=0.02) as tap:
        losses = library.train(model, lambda: hooks.append(library.hooks_on(model)), steps=10, optimizer=optimizer)
    assert losses == expected
    assert all(map(np.array_equal, library.parameters(plain), library.parameters(model)))
    assert tap.run.steps == [0, 4, 8]
    assert any("budget=0.02: 3 of 10 steps recorded" in text for text in tap.run.notices)
    counts = {len(list(tap.run.records(step=step, kind=("output", "param_grad")))) for step in tap.run.steps}
    assert len(counts) == 1  # hooks came back whole
    recorded = {hooks[3], hooks[7]}
    assert len(recorded) == 1 and min(recorded) > 0
    assert not any(hooks[:3] + hooks[4:7])
    assert library.hooks_on(model) == 0


def test_steps_win_over_a_budget() -> None:
    model = torch.nn.Linear(4, 2)
    with tt.capture(model, steps=[1, 2], budget=0.02) as tap:
        for _ in range(6):
            loss_of(model(torch.ones(3, 4))).backward()
            tap.step()
    assert tap.run.steps == [1, 2]
    assert "budget=0.02 is not applied: steps= selects the steps" in tap.notices

"""Tensors that are read together, a little after they were seen: only where that makes no difference.

A CPU stands in for the device: its workshop puts off what it may, and reads it when a few have come together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, everything
from tensortap.capture import steadiness
from tensortap.frameworks.base import Collected
from tensortap.frameworks.torch import Torch
from tensortap.frameworks.torch_ops import OpsTicket, OpsWorkshop


class Patient(OpsWorkshop):
    """Reads what may wait four at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[torch.Tensor, int, int]] = []
        self._missed: set[tuple[int, int]] = set()
        self.waited = 0

    def submit(self, tensor: torch.Tensor, known: OpsTicket | None = None, later: bool = False) -> OpsTicket:
        ticket = super().submit(tensor, known)
        if later:
            self.waited += 1
            self._waiting.append((tensor.detach(), tensor._version, ticket.number))
            if len(self._waiting) == 4:
                self._settle()
        return ticket

    def _settle(self) -> None:
        for tensor, version, number in self._waiting:
            if tensor._version != version:
                self._missed.add((id(self._step), number))
            else:
                self._step.rows[number] = OpsWorkshop.submit(OpsWorkshop(), tensor).step.rows[0]
        self._waiting.clear()

    def end_step(self) -> None:
        self._settle()
        super().end_step()

    def collect(self, tickets: Sequence[OpsTicket]) -> Collected:
        missed = {place for place, ticket in enumerate(tickets) if (id(ticket.step), ticket.number) in self._missed}
        return super().collect(tickets)._replace(missed=missed)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Patient:
    workshop = Patient()
    monkeypatch.setattr(Torch, "workshop", lambda self, tensor: workshop)
    return workshop


class Chain(nn.Module):
    """Linear modules; `between` may change what one has put out before the next takes it."""

    def __init__(self, between: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self._between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts):
            x = self._between(number, part(x))
        return x


def record(path: Path, between: Callable[[int, int, torch.Tensor], torch.Tensor], steps: int, **options: Any) -> Any:
    """`between` is told the step, too."""
    torch.manual_seed(0)
    now = [0]
    model = Chain(lambda number, x: between(now[0], number, x))
    with tt.capture(model, path, classes="Linear", **options) as tap:
        for step in range(steps):
            now[0] = step
            model(torch.randn(4, 8)).square().sum().backward()
            model.zero_grad()
            tap.step()
            tap.flush()
    return tap


def plainly(step: int, number: int, x: torch.Tensor) -> torch.Tensor:
    return x


def test_the_run_is_the_same(tmp_path: Path, patient: Patient) -> None:
    for name, gather in (("once", False), ("later", True)):
        torch.manual_seed(3)
        model = zoo.Residual()
        optimizer = torch.optim.AdamW(model.parameters())
        with tt.capture(model, tmp_path / name, optimizer=optimizer, kinds=ALL_KINDS, gather=gather) as tap:
            for step in range(4):
                model(zoo.batch(seed=step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                tap.flush()
        assert bool(patient.waited) == gather
    assert everything(tt.open(tmp_path / "once")) == everything(tt.open(tmp_path / "later"))


def test_what_is_changed_in_every_step_is_never_put_off(tmp_path: Path, patient: Patient) -> None:
    def double(step: int, number: int, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) if number in (1, 4) else x

    def double_unseen(step: int, number: int, x: torch.Tensor) -> torch.Tensor:
        if number in (1, 4):
            x.data.mul_(2)
        return x

    for name, between in (("counted", double), ("unseen", double_unseen)):
        for gather in (False, True):
            tap = record(tmp_path / f"{name}-{gather}", between, 4, gather=gather)
            assert not tap.notices
        runs = [tt.open(tmp_path / f"{name}-{gather}") for gather in (False, True)]
        assert everything(runs[0]) == everything(runs[1])
    assert patient.waited


def test_a_change_that_comes_as_a_surprise_is_told_and_not_recorded(tmp_path: Path, patient: Patient) -> None:
    def late(step: int, number: int, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) if number == 2 and step >= 2 else x

    tap = record(tmp_path / "run", late, 5, kinds="output")
    (notice,) = tap.notices
    assert "parts.2: output 0 was changed in place" in notice and "gather=False" in notice
    record(tmp_path / "true", late, 5, kinds="output", gather=False)
    found, true = tt.open(tmp_path / "run"), tt.open(tmp_path / "true")
    missing = {r.key for r in true} - {r.key for r in found}
    assert [(key.step, key.module) for key in missing] == [(2, "parts.2")]
    digests = {r.key: r.summary.digest for r in true}
    assert all(r.summary.digest == digests[r.key] for r in found)
    assert tt.compare(tmp_path / "run", tmp_path / "run").verdict == "match"


def test_a_change_that_nobody_counts_is_found_when_its_place_is_tried_again(
    tmp_path: Path, patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steadiness, "_CHECKED_EVERY", 4)

    def late(step: int, number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 2 and step >= 2:
            x.data.mul_(2)
        return x

    tap = record(tmp_path / "run", late, 12, kinds="output")
    (notice,) = tap.notices
    assert "parts.2: output 0 was changed without its framework knowing" in notice and "last 4 steps" in notice
    record(tmp_path / "true", late, 12, kinds="output", gather=False)
    pairs = zip(tt.open(tmp_path / "run"), tt.open(tmp_path / "true"), strict=True)
    wrong = {(a.key.step, a.key.module) for a, b in pairs if a.summary.digest != b.summary.digest}
    assert wrong <= {(step, "parts.2") for step in range(2, 7)}


def test_what_needs_no_gradient_and_what_is_kept_whole_is_read_at_once(tmp_path: Path, patient: Patient) -> None:
    record(tmp_path / "whole", plainly, 3, keep="tensors")
    with torch.no_grad():
        model = Chain(lambda number, x: x)
        with tt.capture(model, tmp_path / "inference") as tap:
            for _ in range(3):
                model(torch.randn(4, 8))
                tap.step()
                tap.flush()
    assert not patient.waited

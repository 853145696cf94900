"""Tensors that are read together, a little after they were seen: only where that makes no difference.

A CPU acts as the device, which runs deferred reads once a few have accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support import fake_gpu, zoo
from support.fake_gpu import Blocks, FakeReader, nothing
from support.tapping import ALL_KINDS, everything
from tensortap.capture.recording.deferred import read_order as read_order

OUTPUT_BYTES = 4 * 8 * 4


@pytest.fixture(params=["C", "Python"])
def patient(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FakeReader]:
    """Deferred reads run after four more outputs of a chain at the latest."""
    fake_gpu.choose_language(monkeypatch, request.param)
    with fake_gpu.window(monkeypatch, 4 * OUTPUT_BYTES):
        yield fake_gpu.install(monkeypatch)()


class Chain(nn.Module):
    """Linear modules; `between` may change an output before the next module receives it."""

    def __init__(self, between: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self._between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts):
            x = self._between(number, part(x))
        return x


def record(
    path: Path, between: Callable[[int, int, torch.Tensor], torch.Tensor], count: int, micros: int = 1, **options: Any
) -> Any:
    """`between` receives the step, plus a hundred for each micro step."""
    torch.manual_seed(0)
    now = [0]
    model = Chain(lambda number, x: between(now[0] // micros, now[0] % micros * 100 + number, x))
    with tt.capture(model, path, classes="Linear", **options) as tap:
        for step in range(count):
            for micro in range(micros):
                now[0] = step * micros + micro
                model(torch.randn(4, 8)).square().sum().backward()
            model.zero_grad()
            tap.step()
            tap.flush()
    return tap


def plainly(step: int, number: int, x: torch.Tensor) -> torch.Tensor:
    return x


def test_the_run_is_the_same(tmp_path: Path, patient: FakeReader) -> None:
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


@pytest.mark.parametrize("changed", [{0}, {1, 4}, {2, 3}, {5}, {0, 2, 4}, {101}, {3, 104}])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("kinds", ["output", ("input", "output", "grad_output", "param_grad")])
def test_a_tensor_that_changes_in_every_step_is_never_deferred(
    tmp_path: Path, patient: FakeReader, changed: set[int], counted: bool, kinds: Any
) -> None:
    def double(step: int, number: int, x: torch.Tensor) -> torch.Tensor:
        if number in changed and counted:
            return x.mul_(2)
        if number in changed:
            x.data.mul_(2)
        return x

    for gather in (False, True):
        tap = record(tmp_path / str(gather), double, 5, micros=2, gather=gather, kinds=kinds)
        assert not tap.notices
    assert everything(tt.open(tmp_path / "False")) == everything(tt.open(tmp_path / "True"))
    assert patient.waited


def test_a_change_long_after_is_seen_by_the_trial_if_it_could_be_by_the_reading(
    tmp_path: Path, patient: FakeReader
) -> None:
    earlier: list[torch.Tensor] = []

    def change_the_one_before(step: int, number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 0:
            earlier.clear()
        earlier.append(x)
        if number >= 3:
            earlier[number - 3].data.mul_(2)  # three tensors later; four are waited for
        return x

    for gather in (False, True):
        record(tmp_path / str(gather), change_the_one_before, 6, gather=gather, kinds="output")
    assert everything(tt.open(tmp_path / "False")) == everything(tt.open(tmp_path / "True"))


def test_few_recorded_steps_need_one_trial(tmp_path: Path, patient: FakeReader) -> None:
    model = Blocks(6, nothing)
    waited = []
    with tt.capture(model, tmp_path / "run", steps=range(0, 100, 10), kinds="output") as tap:
        for number in range(12):
            model(torch.randn(4, 8)).sum().backward()
            tap.step()
            tap.flush()
            if number in (0, 10):
                waited.append(patient.waited)
    assert waited[0] == 0 < waited[1]


def test_an_unexpected_change_is_reported_and_not_recorded(tmp_path: Path, patient: FakeReader) -> None:
    def late(step: int, number: int, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) if number == 2 and step >= 2 else x

    tap = record(tmp_path / "run", late, 5, kinds="output")
    (notice,) = tap.notices
    assert "parts.2: output 0 was changed in place" in notice and "gather=False" in notice
    assert tap.stats()["records"] == len(tt.open(tmp_path / "run"))
    record(tmp_path / "true", late, 5, kinds="output", gather=False)
    found, true = tt.open(tmp_path / "run"), tt.open(tmp_path / "true")
    missing = {r.key for r in true} - {r.key for r in found}
    assert [(key.step, key.module) for key in missing] == [(2, "parts.2")]
    digests = {r.key: r.summary.digest for r in true}
    assert all(r.summary.digest == digests[r.key] for r in found)
    assert tt.compare(tmp_path / "run", tmp_path / "run").verdict == "match"


def test_an_uncounted_change_is_found_by_the_next_trial(
    tmp_path: Path, patient: FakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_order, "_RETRIED_AFTER", 4)

    def late(step: int, number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 2 and step >= 3:
            x.data.mul_(2)
        return x

    tap = record(tmp_path / "run", late, 12, kinds="output")
    (notice,) = tap.notices
    assert "parts.2: output 0 was changed without its framework knowing" in notice and "since step 0 " in notice
    record(tmp_path / "true", late, 12, kinds="output", gather=False)
    pairs = zip(tt.open(tmp_path / "run"), tt.open(tmp_path / "true"), strict=True)
    wrong = {(a.key.step, a.key.module) for a, b in pairs if a.summary.digest != b.summary.digest}
    assert wrong == {(step, "parts.2") for step in range(3, 4)}


def test_places_are_tried_again_by_the_steps_that_are_recorded(
    tmp_path: Path, patient: FakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_order, "_RETRIED_AFTER", 4)
    record(tmp_path / "run", plainly, 4 * 12, kinds="output", steps=range(0, 48, 4))
    assert patient.tried == 3 * 6, "in the first step, within four more, and four after that; next would be eight"
    tt.open(tmp_path / "run")


def test_all_is_read_when_the_forward_is_over(tmp_path: Path, patient: FakeReader) -> None:
    torch.manual_seed(0)
    model = Chain(lambda number, x: x)
    with tt.capture(model, tmp_path / "run", kinds="output", classes="Linear") as tap:
        for _ in range(4):
            loss = model(torch.randn(4, 8)).sum()
            assert patient.waiting() == 0
            loss.backward()
            tap.step()
            tap.flush()
    assert patient.waited


def test_notices_are_in_the_run_although_training_failed(tmp_path: Path, patient: FakeReader) -> None:
    def late(step: int, number: int, x: torch.Tensor) -> torch.Tensor:
        if step == 4:
            raise ZeroDivisionError
        return x.mul_(2) if number == 2 and step >= 3 else x

    with pytest.raises(ZeroDivisionError):
        record(tmp_path / "run", late, 6, kinds="output")
    assert any("parts.2" in notice for notice in tt.open(tmp_path / "run").notices)


def test_tensors_without_gradient_and_kept_tensors_are_read_at_once(tmp_path: Path, patient: FakeReader) -> None:
    record(tmp_path / "whole", plainly, 3, keep="tensors")
    assert not patient.waited
    with torch.no_grad():
        model, held = Chain(lambda number, x: x), list[int]()
        for part in model.parts:
            part.register_forward_hook(lambda *_: held.extend(len(lane._waiting) for lane in patient._opened))
        with tt.capture(model, tmp_path / "inference") as tap:
            for _ in range(3):
                model(torch.randn(4, 8))
                tap.step()
                tap.flush()
    last = [row.tensor for row in tt.open(tmp_path / "inference") if row.key.step == 2]
    assert len(set(last)) < len(last), "those that the step has shown before are not read again"
    assert held and not any(held), "no other one waits"


def test_parameters_are_read_together(tmp_path: Path, patient: FakeReader) -> None:
    for name, gather in (("once", False), ("together", True)):
        torch.manual_seed(0)
        model = Chain(lambda number, x: x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        patient.gpu.together_.clear()
        patient.gpu.alone = 0
        with tt.capture(model, tmp_path / name, kinds=("param", "buffer"), gather=gather) as tap:
            for _ in range(3):
                model(torch.randn(4, 8)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                tap.step()
        assert not tap.notices
        assert sum(patient.gpu.together_) + patient.gpu.alone == 72, "each is read every time, before and after a step"
        assert bool(patient.gpu.together_) == gather
    once, together = (everything(tt.open(tmp_path / name)) for name in ("once", "together"))
    assert once == together and len(once) == 72

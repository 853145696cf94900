"""If the disk fails, the step in progress completes, one error follows at its end, and earlier records stay."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, hooks_on
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.recording.recorder import Recorder
from tensortap.capture.watching.uncounted_steps import UncountedSteps
from tensortap.capture.watching.watcher import Watcher
from tensortap.cli import app
from tensortap.errors import CaptureError


class Disk:
    """Stands before os.write and os.pwrite; can be made full, or lose its permission, at any moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        self.failed = threading.Event()
        for name in ("write", "pwrite", "pwritev", "writev"):
            if hasattr(os, name):
                monkeypatch.setattr(os, name, self._before(getattr(os, name)))

    def _before(self, true: Any) -> Any:
        def call(fd: int, *args: Any) -> Any:
            if self.error is not None and "rank_0" in os.readlink(f"/proc/self/fd/{fd}"):
                self.failed.set()
                raise OSError(self.error, os.strerror(self.error))
            return true(fd, *args)

        return call


def train(model: torch.nn.Module, tap: Any, disk: Disk, fail_at: int, code: int) -> list[Any]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        loss = zoo.loss_of(model(zoo.batch(seed=step)))
        if step == fail_at:
            tap.flush()
            disk.error = code
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if tap is not None:
            tap.step()
    return losses


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_raise_is_one_error_at_the_end_of_a_step(run_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    disk, model = Disk(monkeypatch), zoo.Residual()
    options = {"keep": "tensors", "kinds": ALL_KINDS, "on_error": "raise"}
    with pytest.raises(CaptureError) as caught, tt.capture(model, run_path, **options) as tap:
        try:
            train(model, tap, disk, 2, code)
        finally:
            assert disk.failed.wait(60)  # writers may still have to come to it
            disk.error = None
    message = str(caught.value)
    assert os.strerror(code) in message and "\n" not in message and str(run_path) in message
    assert hooks_on(model) == 0
    run = tt.open(run_path)
    assert {0, 1} <= set(run.steps) and not run.finished
    assert all(run.load(record) is not None for record in run.records(step=(0, 1)))


@pytest.mark.filterwarnings("error")
def test_by_default_the_tap_stops_and_training_goes_on(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Disk(monkeypatch)
    torch.manual_seed(3)
    plain = train(zoo.Residual(), None, disk, 99, 0)
    torch.manual_seed(3)
    model = zoo.Residual()
    with tt.capture(model, run_path, keep="tensors") as tap:
        tapped = train(model, tap, disk, 2, errno.ENOSPC)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tensortap: ") and "No space left" in line and "continues untapped" in line
    assert all(map(torch.equal, plain, tapped)) and hooks_on(model) == 0
    disk.error = None
    assert {0, 1} <= set(tt.open(run_path).steps)


def test_an_error_inside_a_hook_does_not_break_the_step(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are whole although the tap failed in the middle of backward."""
    torch.manual_seed(0)
    model = zoo.Residual()
    zoo.loss_of(model(zoo.batch())).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    quickest_take, calls = Recorder.quickest_take, []

    def failing_take(recorder: Recorder) -> Any:
        take = quickest_take(recorder)

        def failing(*args: Any) -> bool:
            calls.append(1)
            if len(calls) == 14:
                raise MemoryError("no room for a summary")
            return take(*args)

        return failing

    monkeypatch.setattr(Recorder, "quickest_take", failing_take)
    options = {"kinds": ALL_KINDS, "on_error": "raise"}
    with pytest.raises(CaptureError, match="no room"), tt.capture(model, run_path, **options) as tap:
        zoo.loss_of(model(zoo.batch())).backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
        tap.step()
    assert len(calls) == 14


def test_an_error_in_a_step_that_follows_its_plan_does_not_break_it(run_path: Path, capsys: Any) -> None:
    """The hooks that follow a plan have a guard of their own where they are in C."""
    torch.manual_seed(0)
    model = zoo.Residual()
    zoo.loss_of(model(zoo.batch())).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    calls = []

    def failing(*args: Any) -> bool:
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError("no room for a summary")
        return True

    with tt.capture(model, run_path) as tap:
        for step in range(5):
            model.zero_grad()
            if step == 4:
                tap._watcher.destination.take = failing
            zoo.loss_of(model(zoo.batch())).backward()
            assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
            if step == 3:
                assert tap._watcher._follower.following
            tap.step()
    assert len(calls) == 5 and hooks_on(model) == 0
    assert "no room for a summary" in capsys.readouterr().err
    assert tt.open(run_path).failure


def test_the_users_own_error_is_not_hidden_by_ours(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, model = Disk(monkeypatch), zoo.Residual()
    with pytest.raises(ZeroDivisionError), tt.capture(model, run_path, keep="tensors"):
        zoo.loss_of(model(zoo.batch())).backward()
        disk.error = errno.ENOSPC
        raise ZeroDivisionError
    assert hooks_on(model) == 0


def test_a_folder_that_vanishes(run_path: Path) -> None:
    import shutil

    model = zoo.Residual()
    with pytest.raises(CaptureError), tt.capture(model, run_path, keep="tensors", on_error="raise") as tap:
        for step in range(3):
            zoo.loss_of(model(zoo.batch())).backward()
            tap.step()
            if not step:
                tap.flush()
                shutil.rmtree(run_path)
    assert hooks_on(model) == 0


def broken(*_: Any) -> Any:
    raise RuntimeError("a mistake of ours")


PLACES = [
    pytest.param(CoverageBook, "called", id="in a hook"),
    pytest.param(Watcher, "end_step", id="at the end of a step"),
    pytest.param(Watcher, "_drop_step_hooks", id="when hooks are removed"),
    pytest.param(UncountedSteps, "notice", id="at close"),
]


@pytest.mark.parametrize(("cls", "name"), PLACES)
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_an_error_inside_the_tap_stops_only_the_recording(
    run_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cls: type,
    name: str,
    framework: str,
) -> None:
    """The reason is on stderr, in the run, and in the output of `show`."""
    library = pytest.importorskip(framework)
    model = library.nn.Linear(3, 2)
    with tt.capture(model, run_path) as tap:
        for step in range(3):
            if step == 1:
                monkeypatch.setattr(cls, name, broken)
            model(library.ones([4, 3])).sum().backward()
            tap.step()
    monkeypatch.undo()
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("tensortap: "))
    assert "a mistake of ours" in line and "continues untapped" in line
    run = tt.open(run_path)
    assert "a mistake of ours" in run.failure and 0 in run.steps
    assert "a mistake of ours" in CliRunner().invoke(app, ["show", str(run_path)]).output.replace("\n", " ")
    assert framework == "paddle" or hooks_on(model) == 0

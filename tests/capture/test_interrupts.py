"""An exception that a user's signal handler raises while a hook runs reaches the user."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import tensortap as tt
from support.tapping import ALL_KINDS
from tensortap.capture.recording import recorder
from tensortap.capture.recording.recorder import Recorder
from tensortap.core.interrupts import interrupt_in

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no interval timer")


class TooLate(Exception):
    """The exception that the user's handler raises."""


class Deadline:
    """Raises in the middle of the first record of a kind, through a real timer and a real handler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, call: int | None = None) -> None:
        self.fired = 0
        true = recorder.Recorder.take

        def take(this: Any, tensor: Any, slot: Any, step: int) -> bool:
            if slot.kind == kind and call in (None, slot.call) and not self.fired:
                signal.setitimer(signal.ITIMER_REAL, 1e-3)
                until = time.monotonic() + 20
                while time.monotonic() < until:
                    pass
            return true(this, tensor, slot, step)

        monkeypatch.setattr(recorder.Recorder, "take", take)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.fired += 1
        raise TooLate("the time is up")


@pytest.fixture
def alarm() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGALRM)

    def install(handler: Any) -> None:
        signal.signal(signal.SIGALRM, handler)

    yield install
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def torch_step() -> tuple[Any, Callable[[], None], Callable[[], int]]:
    import torch
    from torch import nn

    from support.tapping import hooks_on

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model, lambda: model(torch.ones(2, 4)).sum().backward(), lambda: hooks_on(model)


def paddle_step() -> tuple[Any, Callable[[], None], Callable[[], int]]:
    paddle = pytest.importorskip("paddle")
    paddle.seed(0)
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.ReLU(), paddle.nn.Linear(4, 4))

    def hooks() -> int:
        layers = model.sublayers(include_self=True)
        return sum(len(layer._forward_pre_hooks) + len(layer._forward_post_hooks) for layer in layers)

    return model, lambda: model(paddle.ones([2, 4])).sum().backward(), hooks


STEPS = {"torch": torch_step, "paddle": paddle_step}


@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind != "buffer"])
@pytest.mark.parametrize("framework", STEPS)
def test_it_reaches_the_user_from_every_kind_of_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alarm: Any, framework: str, kind: str
) -> None:
    model, step, hooks = STEPS[framework]()
    deadline = Deadline(monkeypatch, kind)
    alarm(deadline)
    with pytest.raises(TooLate), tt.capture(model, tmp_path / "run", kinds=ALL_KINDS):
        step()
    assert deadline.fired == 1 and hooks() == 0
    run = tt.open(tmp_path / "run")
    assert not run.finished and "TooLate: the time is up" in run.failure
    assert any("TooLate interrupted the tap at step 0" in notice for notice in run.notices)


@pytest.mark.parametrize("framework", STEPS)
def test_it_reaches_the_user_from_the_end_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alarm: Any, framework: str
) -> None:
    model, step, hooks = STEPS[framework]()
    alarm(Deadline(monkeypatch, "param", call=1))
    with pytest.raises(TooLate), tt.capture(model, tmp_path / "run", kinds=ALL_KINDS) as tap:
        step()
        tap.step()
    assert hooks() == 0 and "TooLate" in tt.open(tmp_path / "run").failure


@pytest.mark.parametrize("kind", ["output", "grad_output"])
@pytest.mark.parametrize("framework", STEPS)
def test_training_continues_if_the_user_catches_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alarm: Any,
    framework: str,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, step, hooks = STEPS[framework]()
    deadline = Deadline(monkeypatch, kind)
    alarm(deadline)
    with tt.capture(model, tmp_path / "run") as tap:
        with pytest.raises(TooLate):
            step()
            tap.step()  # paddle's engine cannot raise it before
        if tap.stats()["steps"] == 0:
            tap.step()
        for _ in range(2):
            step()
            tap.step()
    assert hooks() == 0 and not capsys.readouterr().err
    run = tt.open(tmp_path / "run")
    assert run.finished and {1, 2} <= set(run.steps)
    whole = [sorted(record.key[1:] for record in run.records(step=number)) for number in (1, 2)]
    assert whole[0] and whole[0] == whole[1]


def test_an_error_of_the_tap_does_not_reach_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Also while the user handles an exception of a signal handler."""
    model, step, hooks = torch_step()

    def failing(*args: Any, **options: Any) -> Any:
        raise MemoryError("no room for a summary")

    monkeypatch.setattr(Recorder, "quickest_take", lambda _: failing)
    try:
        raise_from_handler(lambda number, frame: raise_(TooLate()))
    except TooLate:
        with tt.capture(model, tmp_path / "run") as tap:
            step()
            tap.step()
    assert "no room for a summary" in capsys.readouterr().err and hooks() == 0


# --- which exceptions are a handler's ------------------------------------------------------------------------------
def raise_(error: BaseException) -> None:
    raise error


def raise_from_handler(handler: Any) -> None:
    """Call a handler as the interpreter does: in the middle of a frame, with that frame."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.raise_signal(signal.SIGALRM)
        for _ in range(1000):
            pass
    finally:
        signal.signal(signal.SIGALRM, before)


class Handlers:
    def method(self, number: int, frame: Any) -> None:
        raise TooLate

    def __call__(self, number: int, frame: Any) -> None:
        raise TooLate

    def more(self, extra: str, number: int, frame: Any) -> None:
        raise TooLate

    def calls_another(self, *arguments: Any) -> None:
        self.method(*arguments)

    def restores_the_default(self, number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise TooLate

    def deletes_its_arguments(self, number: int, frame: Any) -> None:
        del number, frame
        raise TooLate


@pytest.mark.parametrize(
    "handler",
    [
        Handlers().method,
        Handlers(),
        partial(Handlers().more, "extra"),
        Handlers().calls_another,
        Handlers().restores_the_default,
        Handlers().deletes_its_arguments,
        lambda *_: raise_(TooLate()),
    ],
)
def test_handlers_of_all_forms(handler: Any) -> None:
    caught: list[BaseException] = []
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.raise_signal(signal.SIGALRM)
        for _ in range(1000):
            pass
    except TooLate as error:
        caught.append(error)
        assert interrupt_in(error) is error
        wrapped = OSError("could not write")
        wrapped.__cause__ = error
        assert interrupt_in(wrapped) is error
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught


def test_other_exceptions_are_not_a_handlers() -> None:
    def inspects(number: int, frame: Any) -> None:
        raise ValueError(number)

    for arguments in ((1, None), (1, object()), ("text", "frame")):
        with pytest.raises(ValueError) as caught:
            inspects(*arguments)
        assert interrupt_in(caught.value) is None
    assert interrupt_in(None) is None and interrupt_in(ValueError()) is None

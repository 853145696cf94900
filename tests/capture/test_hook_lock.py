"""The lock of hooks in C, and the time that they take."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.capture import native_classes
from tensortap.capture.watching.hook_guard import HookGuard, new_lock


@pytest.fixture
def lock() -> Any:
    if native_classes.load() is None:
        pytest.skip("no C compiler, or no headers of Python")
    return new_lock()


def test_one_thread_may_take_it_several_times(lock: Any) -> None:
    with lock, lock:
        lock.acquire()
        lock.release()
    with pytest.raises(RuntimeError, match="has not taken"):
        lock.release()


def test_only_its_thread_releases_it(lock: Any) -> None:
    failures: list[BaseException] = []

    def release() -> None:
        try:
            lock.release()
        except RuntimeError as error:
            failures.append(error)

    with lock:
        other = threading.Thread(target=release)
        other.start()
        other.join()
    assert len(failures) == 1


def test_another_thread_waits(lock: Any) -> None:
    taken = threading.Event()

    def take() -> None:
        with lock:
            taken.set()

    other = threading.Thread(target=take)
    with lock:
        with lock:
            other.start()
        assert not taken.wait(0.1), "it was taken twice, and is released once"
    assert taken.wait(10)
    other.join()


def test_many_threads_take_turns(lock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interval = sys.getswitchinterval()
    count = 0

    def add() -> None:
        nonlocal count
        for _ in range(2000):
            with lock, lock:
                before = count
                if before % 50 == 0:
                    time.sleep(0)  # another thread runs meanwhile
                count = before + 1

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=add) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert count == 12_000


def test_it_counts_the_time_of_hooks_in_c(lock: Any, tmp_path: Path) -> None:
    guard = HookGuard(lock, lambda error: None, lambda: None)
    guard.listening = True
    guard(lambda: time.sleep(0.01))()
    assert guard.seconds >= 0.01
    assert lock.seconds == 0
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with tt.capture(model, tmp_path / "run") as tap:
        so_far = []
        for _ in range(5):
            model(torch.ones(2, 4)).square().sum().backward()
            tap.step()
            so_far.append(tap.stats()["seconds_in_hooks"])
        assert tap._lock.seconds > 0, "the last steps followed the plan"  # type: ignore[attr-defined]
    assert 0 < so_far[0] < so_far[1] < so_far[-1]

"""Garbage collections are rarer while a tap is open, and as frequent as before afterwards."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensortap as tt
from tensortap.capture import garbage
from tensortap.capture.tap import Tap

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def opened(path: Path) -> Tap:
    return tt.capture(torch.nn.Linear(2, 2), path)


def test_young_and_full_collections_become_rarer(tmp_path: Path) -> None:
    with opened(tmp_path / "a"):
        assert gc.get_threshold() == (2100, 10, 100)
    assert gc.get_threshold() == (700, 10, 10)


def test_until_the_last_tap_is_closed(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "a"), opened(tmp_path / "b")
    first.close()
    first.close()
    assert gc.get_threshold() == (2100, 10, 100)
    second.close()
    assert gc.get_threshold() == (700, 10, 10)


def test_a_tap_that_is_dropped_is_one_that_is_closed(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    tap = tt.capture(model, tmp_path / "a")
    assert gc.get_threshold() == (2100, 10, 100)
    del tap, model
    gc.collect()
    assert gc.get_threshold() == (700, 10, 10)


def test_thresholds_that_other_code_sets_stay(tmp_path: Path) -> None:
    with opened(tmp_path / "a"):
        gc.set_threshold(5000, 20, 40)
    assert gc.get_threshold() == (5000, 20, 40)


def test_only_the_number_that_was_changed_is_set_back(tmp_path: Path) -> None:
    for _ in range(2):
        with opened(tmp_path / "a"):
            gc.set_threshold(50_000)
        assert gc.get_threshold() == (50_000, 10, 10)
        shutil.rmtree(tmp_path / "a")


def test_the_collector_may_close_a_dropped_tap_in_the_middle_of_anything() -> None:
    def closed_by_the_collector() -> None:
        with garbage._lock:  # another tap is being opened or closed
            garbage.resume(object())

    thread = threading.Thread(target=closed_by_the_collector, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_a_number_that_can_hardly_grow(tmp_path: Path) -> None:
    gc.set_threshold(700, 10, 2**31 - 2)
    with opened(tmp_path / "a"):
        assert gc.get_threshold() == (2100, 10, 2**31 - 1)
    assert gc.get_threshold() == (700, 10, 2**31 - 2)


def test_after_a_failure_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), opened(tmp_path / "a"):
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 10, 10)
    with pytest.raises(tt.TensortapError):
        opened(tmp_path / "a")  # there is a run already
    assert gc.get_threshold() == (700, 10, 10)

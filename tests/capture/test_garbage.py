"""Full garbage collections are put off while a recording is open, and as frequent as before when it is closed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensortap as tt
from tensortap.capture.tap import Tap

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def tap(path: Path) -> Tap:
    return tt.capture(torch.nn.Linear(2, 2), path)


def test_only_the_full_ones_are_put_off(tmp_path: Path) -> None:
    with tap(tmp_path / "a"):
        assert gc.get_threshold() == (700, 10, 1000)
    assert gc.get_threshold() == (700, 10, 10)


def test_until_the_last_recording_ends(tmp_path: Path) -> None:
    first, second = tap(tmp_path / "a"), tap(tmp_path / "b")
    first.close()
    first.close()
    assert gc.get_threshold() == (700, 10, 1000)
    second.close()
    assert gc.get_threshold() == (700, 10, 10)


def test_what_somebody_else_has_set_stays(tmp_path: Path) -> None:
    with tap(tmp_path / "a"):
        gc.set_threshold(5000, 20, 30)
    assert gc.get_threshold() == (5000, 20, 30)


def test_also_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), tap(tmp_path / "a"):
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 10, 10)
    with pytest.raises(tt.TensortapError):
        tt.capture(torch.nn.Linear(2, 2), tmp_path / "a")  # there is a run already
    assert gc.get_threshold() == (700, 10, 10)

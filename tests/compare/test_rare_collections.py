"""The garbage collector runs less often during a comparison, and as before after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tensortap.compare.memory import rare_collections


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_setting_is_restored_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), rare_collections():
        assert gc.get_threshold()[0] > 700
        raise ValueError("inside")
    assert gc.get_threshold() == (700, 10, 10)


def test_the_last_of_several_comparisons_restores_it() -> None:
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] > 700
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_that_the_program_turned_off_stays_off() -> None:
    gc.set_threshold(0)
    with rare_collections():
        assert gc.get_threshold()[0] == 0

"""Two kinds of GELU are told apart in bfloat16, where they differ by less than correct kernels do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from made_runs import Seen, values, write

import tensortap as tt
from tensortap.compare.measure.gelu import are_other_gelus

Array = npt.NDArray[Any]
SHAPE = (64, 64)


def short(array: Array) -> Array:
    return np.asarray(array, np.float64).astype(ml_dtypes.bfloat16)


def exact(x: Array, rounded: Any = np.asarray) -> Array:
    """`rounded` is applied after each operation."""
    wide = x.astype(np.float64)
    erf = rounded(np.vectorize(math.erf)(rounded(wide / math.sqrt(2)))).astype(np.float64)
    return short(0.5 * wide * rounded(1 + erf).astype(np.float64))


def approximate(x: Array) -> Array:
    wide = x.astype(np.float64)
    return short(0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))))


def silu(x: Array) -> Array:
    wide = x.astype(np.float64)
    return short(wide / (1 + np.exp(-wide)))


@pytest.fixture
def given() -> Array:
    return short(values(1, SHAPE))


def test_the_two_kinds_are_told_apart(given: Array) -> None:
    assert are_other_gelus((given, given), (exact(given), approximate(given)))
    assert are_other_gelus((given, given), (approximate(given), exact(given)))
    moved = short(given.astype(np.float64) * (1 + 2**-9 * values(2, SHAPE)))
    assert are_other_gelus((given, moved), (exact(given), approximate(moved)))


def test_the_same_kind_is_not_told_apart(given: Array) -> None:
    moved = short(given.astype(np.float64) * (1 + 2**-9 * values(2, SHAPE)))
    for gelu in (exact, approximate):
        assert not are_other_gelus((given, moved), (gelu(given), gelu(moved)))


def test_a_gelu_that_rounds_each_operation_is_not_told_apart(given: Array) -> None:
    assert (exact(given, short) != exact(given)).mean() > 0.1
    for gelu in (exact, approximate):
        assert not are_other_gelus((given, given), (gelu(given), exact(given, short)))


def test_what_is_no_gelu_is_not_told_apart(given: Array) -> None:
    assert not are_other_gelus((given, given), (silu(given), approximate(given)))
    assert not are_other_gelus((given, given), (given, approximate(given)))
    few = given.reshape(-1)[:32]
    assert not are_other_gelus((few, few), (exact(few), approximate(few)))
    zeros = np.zeros_like(given)
    assert not are_other_gelus((zeros, zeros), (zeros, zeros))


def test_it_is_named_in_a_comparison(tmp_path: Path, given: Array) -> None:
    def records(made: Array) -> list[Seen]:
        return [Seen("act", given, "input", tensor=100), Seen("act", made, tensor=101)]

    reference = write(tmp_path / "a", records(exact(given)))
    result = tt.compare(reference, write(tmp_path / "b", records(approximate(given))))
    assert result.verdict == "diverged" and result.first is not None and result.first.module == "act"
    assert any("GELU by erf" in note and "tanh" in note for note in result.notes)
    flipped = exact(given).copy()
    flipped.reshape(-1)[::7] = short(flipped.reshape(-1)[::7].astype(np.float64) * (1 + 2**-8))
    result = tt.compare(reference, write(tmp_path / "c", records(flipped)))
    assert result.verdict == "match", result.sentence

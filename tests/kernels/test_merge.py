"""A tensor cut into blocks: the merged summary is that of the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tensortap.core import dtypes
from tensortap.core.placement import Placement
from tensortap.core.records import Summary
from tensortap.errors import UsageError
from tensortap.kernels.summary import reference

Array = npt.NDArray[Any]


def random_array(name: str, shape: Sequence[int]) -> Array:
    rng = np.random.default_rng(len(shape))
    dtype = dtypes.numpy_dtype(name)
    if dtype.kind in "iub":
        high = 2 if name == "bool" else 100
        return rng.integers(0, high, shape).astype(dtype)
    values = rng.normal(1, 2, shape)
    return (values + 1j * values[::-1] if dtype.kind == "c" else values).astype(dtype)


def block(shape: tuple[int, ...], offset: tuple[int, ...], part: Array) -> Placement:
    return Placement.of_block(shape, offset, part.shape)


def blocks(array: Array, cuts: Sequence[Sequence[int]]) -> list[Summary]:
    edges = [[0, *cut, n] for cut, n in zip(cuts, array.shape, strict=True)]
    spans = [[slice(a, b) for a, b in itertools.pairwise(edge)] for edge in edges]
    return [
        reference.summarize(array[index], block(array.shape, tuple(span.start for span in index), array[index]))
        for index in itertools.product(*spans)
    ]


def assert_same(merged: Summary, whole: Summary) -> None:
    assert merged.digest == whole.digest
    for field in ("elements", "nan", "posinf", "neginf", "zeros"):
        assert getattr(merged, field) == getattr(whole, field), field
    for field in ("min", "max"):
        assert np.array_equal(getattr(merged, field), getattr(whole, field), equal_nan=True), field
    for field in ("mean", "std", "l1", "l2"):
        assert getattr(merged, field) == pytest.approx(getattr(whole, field), rel=1e-12, nan_ok=True), field
    np.testing.assert_allclose(merged.sketch, whole.sketch, rtol=1e-6, atol=1e-6 * np.abs(whole.sketch).max())


CUTS: list[tuple[tuple[int, ...], list[list[int]]]] = [
    ((1001,), [[1]]),
    ((1001,), [[7, 512, 999]]),
    ((33, 67), [[11], []]),
    ((33, 67), [[], [1]]),
    ((33, 67), [[10, 11], [3, 30, 61]]),
    ((5, 7, 33), [[], [2], [16]]),
    ((5, 7, 33), [[1, 4], [], [5, 6]]),
    ((3, 5, 7, 11), [[1], [2], [3], [5]]),
    ((3, 5, 7, 11), [[], [], [], [1, 2, 3]]),
]


@pytest.mark.parametrize(("shape", "cuts"), CUTS)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "bool", "int8", "float64", "complex64"])
def test_parts_make_the_whole(name: str, shape: tuple[int, ...], cuts: list[list[int]]) -> None:
    array = random_array(name, shape)
    parts = blocks(array, cuts)
    assert_same(reference.merge(parts), reference.summarize(array))
    assert_same(reference.merge(reversed(parts)), reference.summarize(array))


def test_non_finite_elements_are_added_up() -> None:
    array = random_array("float32", (40, 50))
    array[3] = np.nan
    array[7, :9] = np.inf
    array[39, 1] = -np.inf
    assert_same(reference.merge(blocks(array, [[3, 4, 20], [10]])), reference.summarize(array))


def test_merge_of_constants_has_no_spread() -> None:
    array = np.full((9, 1000), 0.1, np.float32)
    merged = reference.merge(blocks(array, [[2, 5], [333]]))
    assert merged.std == 0
    assert merged.mean == np.float32(0.1)


def test_merge_of_nothing() -> None:
    merged = reference.merge([])
    assert merged.elements == merged.digest == merged.l2 == 0
    assert math.isnan(merged.mean)
    assert_same(merged, reference.summarize(np.empty(0)))


def test_a_large_mean_keeps_its_small_spread() -> None:
    array = np.random.default_rng(0).normal(1e4, 1, (64, 1000)).astype(np.float32)
    merged = reference.merge(blocks(array, [list(range(1, 64)), []]))
    assert merged.std == pytest.approx(float(array.astype(np.float64).std()), rel=1e-9)


@pytest.mark.parametrize("start", [0, 2**31, 2**32, 2**35 - 24, 2**35, 2**42, 2**50 + 8])
def test_positions_past_32_bits(start: int) -> None:
    """A tiny block of a huge tensor merges out of its halves, and is not taken for the same block elsewhere."""
    array = random_array("bfloat16", (48,))
    shape = (2**51,)
    here = reference.summarize(array, block(shape, (start,), array))
    halves = [
        reference.summarize(array[s], block(shape, (start + s.start,), array[s])) for s in (slice(0, 21), slice(21, 48))
    ]
    assert_same(reference.merge(halves), here)
    for other in (start + 1, start + 8, start + 2**33, start + 2**45):
        there = reference.summarize(array, block(shape, (other,), array))
        assert there.digest != here.digest
        assert not np.array_equal(there.sketch, here.sketch)


def test_signs_past_32_bits_do_not_repeat() -> None:
    """A constant with groups on both sides of the limit is still spread evenly."""
    ones = np.ones(1 << 14, np.float32)
    shape, limit = (2**40,), 2**35
    both = [reference.summarize(ones, block(shape, (start,), ones)) for start in (0, limit)]
    total = reference.sketch_distance(reference.merge(both), reference.summarize(np.empty(0)))
    assert total == pytest.approx(math.sqrt(2 * ones.size), rel=0.2)


def test_a_block_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"block of shape \(3, 4\) at offset \(2, 0\)"):
        reference.summarize(np.zeros((3, 4)), Placement.of_block((4, 4), (2, 0), (3, 4)))
    with pytest.raises(UsageError):
        reference.summarize(np.zeros((3, 4)), Placement.of_whole((12,), {}, ""))

"""Conversions between tensor layouts, and name patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensortap.mapping.layouts import LayoutConversion, inverse, same_elements
from tensortap.mapping.patterns import matches, translator
from tensortap.mapping.value_matches import find_permutation


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def test_transpose() -> None:
    conversion = LayoutConversion(("w",), (1, 0))
    assert np.array_equal(conversion.apply([numbers(2, 3)]), numbers(2, 3).T)
    assert conversion.result([(2, 3)]) == (3, 2)
    assert conversion.apply([numbers(2, 3)]).flags.c_contiguous


def test_join_and_slice_are_inverse() -> None:
    whole = numbers(6, 4)
    parts = [LayoutConversion(("w",), (1, 0), 0, (at, at + 2)).apply([whole]) for at in (0, 2, 4)]
    assert [part.shape for part in parts] == [(4, 2)] * 3
    assert np.array_equal(LayoutConversion(("a", "b", "c"), (1, 0), 0).apply(parts), whole)


def test_a_scalar_stays_0_dimensional() -> None:
    assert LayoutConversion(("n",)).apply([np.array(3)]).shape == ()


@pytest.mark.parametrize(
    ("conversion", "shape", "moves"),
    [
        (LayoutConversion(("w",)), (3, 4), False),
        (LayoutConversion(("w",), (1, 0)), (3, 4), True),
        (LayoutConversion(("w",), (1, 0)), (3, 1), False),
        (LayoutConversion(("w",), (0, 2, 1)), (3, 1, 4), False),
        (LayoutConversion(("w",), (1, 0, 2)), (3, 2, 4), True),
        (LayoutConversion(("a", "b")), (3,), True),
    ],
)
def test_moves(conversion: LayoutConversion, shape: tuple[int, ...], moves: bool) -> None:
    assert conversion.moves(shape) == moves
    if not moves:
        array = numbers(*shape)
        assert np.array_equal(conversion.apply([array]).reshape(-1), array.reshape(-1))


def test_parts_that_do_not_fit_together() -> None:
    assert LayoutConversion(("a", "b")).result([(2, 3), (2, 4)]) is None
    assert LayoutConversion(("a",), (1, 0)).result([(2, 3, 4)]) is None
    assert LayoutConversion(("a",), cut=(2, 5)).result([(4, 3)]) is None


def test_inverse_and_same_elements() -> None:
    assert inverse((2, 0, 1)) == (1, 2, 0)
    assert same_elements((1, 4), (4,)) and not same_elements((2, 4), (4, 2))


@pytest.mark.parametrize(
    ("target", "source", "axes"),
    [
        ((5, 3, 6), (3, 5, 6), (1, 0, 2)),
        ((2, 3, 8, 9), (2, 8, 9, 3), (0, 3, 1, 2)),
        ((2, 8, 9, 3), (2, 3, 8, 9), (0, 2, 3, 1)),
        ((3, 5, 6), (3, 5, 6), ()),
        ((3, 5, 6), (6, 5, 3), ()),
        ((3, 5), (3, 5, 1), ()),
    ],
)
def test_find_permutation(target: tuple[int, ...], source: tuple[int, ...], axes: tuple[int, ...]) -> None:
    assert find_permutation(target, source) == axes


def test_patterns() -> None:
    assert matches("a.*.c", "a.b.c") and not matches("a.*.c", "a.b.b.c")
    assert matches("a.**", "a.b.c") and matches("a.**", "a") and not matches("a.**", "ab")
    assert matches("a.(1)", "a.(1)"), "only wildcards mean anything but themselves"
    assert translator("a.*.**.d", "x*.**")("a.b.c.c.d") == "xb.c.c"
    assert translator("a", "b")("c") is None

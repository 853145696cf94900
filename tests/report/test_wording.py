"""Numbers, names and shapes as people read them."""

from __future__ import annotations

import doctest
import math

import pytest
from rich.cells import cell_len

from tensortap.report import wording
from tensortap.report.wording import clean, dtype, middle, nbytes, number, shape


def test_the_examples_are_true() -> None:
    assert doctest.testmod(wording).failed == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1.000"),
        (9.9996, "10.00"),
        (-1234.56, "-1235"),
        (12345.6, "12346"),
        (99999.9, "1.000e5"),
        (1e5, "1.000e5"),
        (1.5e-4, "0.0001500"),
        (-1.23456e-5, "-1.235e-5"),
        (5e-324, "4.941e-324"),
        (math.nan, "–"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_600, "1.00 MB"), (10**16, "10000 TB")]
)
def test_sizes(value: int, text: str) -> None:
    assert nbytes(value) == text


def test_shapes_and_dtypes_are_short() -> None:
    assert shape((2, 0, 3)) == "2×0×3"
    assert shape(()) == "scalar"
    assert [dtype(name) for name in ("float32", "uint8", "int8", "bool", "new_type")] == [
        "f32",
        "u8",
        "i8",
        "bool",
        "new_type",
    ]


@pytest.mark.parametrize("width", range(1, 12))
@pytest.mark.parametrize("text", ["abcdefgh", "层层层层层层", "a层b层c层d"])
def test_a_cut_name_fits_and_keeps_its_tail(text: str, width: int) -> None:
    cut = middle(text, width)
    assert cell_len(cut) <= width
    if width > 5:
        assert cut.endswith(text[-1])


@pytest.mark.parametrize("bad", ["\n", "\r", "\x1b[2J", "\x9b31m", "\u202e", "\u2028", "\ud800", "\x07", "\t"])
def test_nothing_steers_the_terminal(bad: str) -> None:
    assert clean(f"a{bad}b").isprintable()


def test_ordinary_names_stay_as_they_are() -> None:
    assert clean("layers.0.[red]x[/red] 层 é") == "layers.0.[red]x[/red] 层 é"

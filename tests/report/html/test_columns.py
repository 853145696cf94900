"""Columns as blocks: they are read back to the digits that are kept."""

from __future__ import annotations

import gzip
from typing import Any

import numpy as np
import pytest

from support.read_page import column
from tensortap.report.html.data.columns import ALL_BITS, PageColumn, bits_for, entries, packed


def round_trip(*columns: PageColumn) -> dict[str, Any]:
    head = {"rows": len(columns[0].values), "columns": entries(columns)}
    raw = {block.id: gzip.decompress(block.data) for block in packed(columns)}
    return {each.name: column(head, raw, each.name) for each in columns}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 255], "u8"),
        ([0, 256], "u16"),
        ([7, 1 << 20], "u32"),
        ([-1, 5], "i32"),
        ([0, 1 << 40], "f64"),
        ([-(1 << 40), 0], "f64"),
        ([], "u8"),
    ],
)
@pytest.mark.parametrize("rising", [False, True])
def test_integers_have_the_shortest_type_that_holds_them(values: list[int], kind: str, rising: bool) -> None:
    one = PageColumn("n", np.array(values, np.int64), "n", rising=rising)
    assert entries([one])[0]["type"] == kind
    assert round_trip(one)["n"].tolist() == values


def test_flags_are_bytes() -> None:
    one = PageColumn("flag", np.array([True, False]), "flag")
    assert entries([one])[0]["type"] == "u8"
    assert round_trip(one)["flag"].tolist() == [1, 0]


def test_floats_keep_all_bits_of_float32_by_default() -> None:
    values = np.array([0.0, -0.0, 1 / 3, 1e-45, 3.4e38, np.nan, np.inf, -np.inf])
    found = round_trip(PageColumn("x", values, "x"))["x"]
    np.testing.assert_array_equal(found, values.astype(np.float32))


@pytest.mark.parametrize("bits", [10, ALL_BITS])
@pytest.mark.parametrize("odd", [1e300, 1e-60])
def test_values_beyond_float32_have_a_longer_type(odd: float, bits: int) -> None:
    columns = (
        PageColumn("a", np.array([1.0, -2.5]), "a", bits=bits),
        PageColumn("b", np.array([odd, 3.0]), "b", "", like="a"),
    )
    assert [entry["type"] for entry in entries(columns)] == ["f64", "f64"]
    found = round_trip(*columns)
    assert found["a"].tolist() == [1.0, -2.5]
    assert found["b"].tolist() == [odd, 3.0]
    assert entries([PageColumn("c", np.array([1e-45, np.inf, np.nan]), "c")])[0]["type"] == "f32"


def test_a_column_like_another_is_stored_as_a_difference() -> None:
    rng = np.random.default_rng(0)
    ours = rng.normal(size=1000)
    theirs = ours.copy()
    theirs[7] = np.nan
    columns = PageColumn("a", ours, "a", bits=11), PageColumn("b", theirs, "b", bits=11, like="a")
    found = round_trip(*columns)
    assert np.isnan(found["b"][7])
    np.testing.assert_array_equal(np.delete(found["a"], 7), np.delete(found["b"], 7))
    sizes = {block.id: len(block.data) for block in packed(columns)}
    assert sizes["column-b"] < sizes["column-a"] / 10


@pytest.mark.parametrize("bits", [7, 10, 22])
def test_rounding_is_to_the_nearest_and_keeps_finite_values_finite(bits: int) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=500) * 10.0 ** rng.integers(-30, 30, 500)
    extremes = [np.finfo(np.float32).max, -1e300, 1e300, 0.0, np.inf, np.nan]
    found = round_trip(PageColumn("x", np.concatenate([values, extremes]), "x", bits=bits))["x"]
    np.testing.assert_allclose(found[:500], values, rtol=2.0 ** -(bits + 1) + 2.0**-24, atol=0)
    assert np.isfinite(found[500:504]).all()
    assert found[501] == -found[502]
    assert np.isinf(found[504])
    assert np.isnan(found[505])


def test_small_whole_numbers_survive_rounding() -> None:
    values = np.arange(0, 256, dtype=np.float64)
    np.testing.assert_array_equal(round_trip(PageColumn("ulp", values, "ulp", bits=7))["ulp"], values)


def test_only_long_tables_are_rounded() -> None:
    assert bits_for(20_000) == bits_for(20_000, error=True) == ALL_BITS
    assert bits_for(20_001, error=True) < bits_for(20_001) < ALL_BITS

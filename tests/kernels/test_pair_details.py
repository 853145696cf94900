"""Details of a pair agree with the definition of how far two tensors are apart."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensortap.core.details import Window
from tensortap.kernels.pairs import details
from tensortap.kernels.pairs.details import Folded, histogram_of, inspect_pair, map_of, ulps_apart
from tensortap.kernels.pairs.reference import measure
from tensortap.kernels.summary.reference import components

FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
DTYPES = (*FLOATS, np.complex64, np.int64, np.int8, np.bool_)
SHAPES = ((3, 17, 65), (5,), (), (1, 1), (64, 3, 3, 3), (0, 4), (2, 3_000))


def two(shape: tuple[int, ...], dtype: Any, other: Any = None, nan: bool = True) -> tuple[Any, Any]:
    rng = np.random.default_rng(len(shape))
    reference = (rng.normal(size=shape) * 10).astype(dtype)
    candidate = np.array(reference.astype(np.complex128 if np.dtype(dtype).kind == "c" else np.float64))
    candidate = (candidate + rng.normal(size=shape) * 0.1).astype(other or dtype)
    if nan and candidate.size > 4 and np.dtype(dtype).kind not in "iub":
        candidate = np.array(candidate)
        candidate.reshape(-1)[3] = np.nan
    return reference, candidate


def bounds(*arrays: Any) -> tuple[float, float, float]:
    values = np.concatenate([components(array).astype(np.float64).reshape(-1) for array in arrays])
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        size = float(np.sqrt(np.square(values).mean())) if values.size else 0.0
    return float(values.min(initial=0)), float(values.max(initial=0)), size


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_it_agrees_with_the_definition(shape: tuple[int, ...], dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(details, "_BLOCK", 1000)
    reference, candidate = two(shape, dtype)
    found = inspect_pair(reference, candidate, bounds(reference, candidate), (1e-3, 1e-5))
    expected = measure(reference, candidate).difference
    r, c = (components(side).astype(np.float64) for side in (reference, candidate))
    assert found.histogram.reference.sum() == np.isfinite(r).sum()
    assert found.histogram.candidate is not None
    assert found.histogram.candidate.sum() == np.isfinite(c).sum()
    assert found.ulps.counts.sum() == r.size
    assert found.map.tiles.max(initial=0) == expected.max_abs == found.needed.atol
    assert max(found.map.tiles.shape) <= details.TILES
    assert (found.worst[0].index if found.worst else None) == expected.max_abs_index
    with np.errstate(invalid="ignore"):
        same = (r == c) | (np.isnan(r) & np.isnan(c))
    assert found.ulps.counts[0] == same.sum()
    gaps = [np.inf if np.isnan(each.difference) else abs(each.difference) for each in found.worst]
    assert gaps == sorted(gaps, reverse=True)
    assert len(gaps) == min(details.WORST, int((~same).sum()))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("other", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
def test_ulps_are_those_of_the_definition(dtype: Any, other: Any) -> None:
    reference, candidate = two((40, 50), dtype, other, nan=False)
    names = np.dtype(dtype).name, np.dtype(other).name
    apart = ulps_apart(reference, candidate, names)
    assert apart.max() == measure(reference, candidate).difference.max_ulp
    for at in ((0, 0), (3, 7), (39, 49)):
        assert apart[at] == measure(reference[at].reshape(1), candidate[at].reshape(1)).difference.max_ulp


def test_across_zero_no_place_is_lost() -> None:
    r, c = np.array([-1e308, -5e-324, 0.0, 1.0]), np.array([1e308, 5e-324, -0.0, np.nextafter(1.0, 2)])
    apart = ulps_apart(r, c, ("float64", "float64"))
    assert apart.tolist() == [measure(r[:1], c[:1]).difference.max_ulp, 2, 0, 1]


def test_worst_elements_have_their_index_and_both_values() -> None:
    reference = np.zeros((3, 4, 5), np.float32)
    candidate = reference.copy()
    candidate[2, 1, 3], candidate[0, 0, 0], candidate[1, 3, 4] = 7, -9, 7
    found = inspect_pair(reference, candidate, (-9, 7, 0), (0, 0)).worst
    assert [(each.index, each.candidate, each.difference) for each in found] == [
        ((0, 0, 0), -9, -9),
        ((1, 3, 4), 7, 7),
        ((2, 1, 3), 7, 7),
    ]


def test_the_first_of_equally_bad_elements_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(details, "_BLOCK", 64)
    reference, candidate = np.zeros((50, 32)), np.ones((50, 32))
    candidate[49, 31] = 2
    found = inspect_pair(reference, candidate, (0, 2, 1), (0, 0)).worst
    assert [each.index for each in found] == [(49, 31), *((0, column) for column in range(details.WORST - 1))]


@pytest.mark.parametrize("block", [7, 64, 1 << 19])
@pytest.mark.parametrize("shape", [(130, 300), (1, 1000), (1000, 1), (3, 4, 50), (65, 65)], ids=str)
def test_tiles_hold_the_greatest_difference_for_any_block_size(
    shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(details, "_BLOCK", block)
    candidate = np.random.default_rng(0).random(shape)
    found = map_of(np.zeros(shape), candidate)
    rows, columns = found.whole
    folded = candidate.reshape(rows, columns)
    height, width = found.tiles.shape
    assert (height, width) == (min(rows, 64), min(columns, 64))
    cuts = [[at * size // tiles for at in range(tiles + 1)] for size, tiles in ((rows, height), (columns, width))]
    for i in (0, height // 2, height - 1):
        for j in (0, width // 2, width - 1):
            tile = folded[cuts[0][i] : cuts[0][i + 1], cuts[1][j] : cuts[1][j + 1]]
            assert found.tiles[i, j] == tile.max()
    assert found.tiles.max() == candidate.max()


def test_a_part_of_the_map_is_of_that_part() -> None:
    candidate = np.random.default_rng(0).random((200, 300))
    found = map_of(np.zeros((200, 300)), candidate, Window(10, 20, 250, 9999))
    assert found.window == (10, 20, 250, 300)
    np.testing.assert_array_equal(found.tiles, candidate[10:20, 250:300])
    assert map_of(np.zeros((2, 3)), np.ones((2, 3)), Window(9, 9, 9, 9)).window == (0, 1, 5, 6)


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((8, 256, 512), 2048, 512),
        ((512,), 1, 512),
        ((), 1, 1),
        ((64, 3, 7, 7), 192, 49),
        ((4, 2), 1, 8),
        ((0, 64), 0, 64),
    ],
)
def test_narrow_dimensions_are_joined(shape: tuple[int, ...], rows: int, columns: int) -> None:
    folded = Folded.of(shape)
    assert (folded.rows, folded.columns) == (rows, columns)


def test_the_tolerance_needed_is_the_smallest_that_passes() -> None:
    reference = np.array([1.0, -2.0, 4.0, 0.0] * 8)
    candidate = reference + np.array([0.1, -0.1, 0.8, 0.0] * 8)
    needed = inspect_pair(reference, candidate, (-3, 5, 2), (0.05, 0)).needed
    assert needed.atol == pytest.approx(0.8)
    assert needed.rtol == pytest.approx(0.2)
    assert needed.atol_with_rtol == pytest.approx(0.6)
    for rtol, atol in ((0, needed.atol), (needed.rtol, 0), (0.05, needed.atol_with_rtol)):
        assert np.all(np.abs(candidate - reference) <= atol + rtol * np.abs(reference) + 1e-12)
    candidate[3] = 1e-9
    assert inspect_pair(reference, candidate, (-3, 5, 2), (0.05, 0)).needed.rtol == np.inf
    candidate[3] = np.nan
    assert inspect_pair(reference, candidate, (-3, 5, 2), (0.05, 0)).needed.atol == np.inf


def test_heavy_tails_get_a_logarithmic_scale() -> None:
    values = np.random.default_rng(0).normal(size=10_000)
    linear = histogram_of(values, bounds(values))
    assert linear.threshold is None
    np.testing.assert_allclose(linear.reference, np.histogram(values, linear.edges)[0], atol=1)
    values[:3] = (1e6, -1e5, 3e5)
    heavy = histogram_of(values, (-1e5, 1e6, 1.0))
    assert heavy.threshold is not None
    assert heavy.reference.sum() == 10_000
    assert np.all(np.diff(heavy.edges) > 0)
    assert (heavy.reference > 0).sum() > 20  # the bulk is not all in one bin
    np.testing.assert_allclose(heavy.reference, np.histogram(values, heavy.edges)[0], atol=2)


@pytest.mark.parametrize("values", [[3.0, 3.0], [0.0], [], [np.nan, np.inf], [-1.7e308, 1.7e308]], ids=str)
def test_odd_tensors_have_a_histogram(values: list[float]) -> None:
    array = np.array(values)
    found = histogram_of(array, bounds(array))
    assert found.reference.sum() == np.isfinite(array).sum()
    assert np.all(np.diff(found.edges) > 0)

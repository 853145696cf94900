"""The compiled kernel for pairs against its definition: counts and positions exactly, sums within rounding."""

from __future__ import annotations

import itertools
import math
import pickle
import threading
from dataclasses import astuple
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tensortap.core import dtypes
from tensortap.errors import UsageError
from tensortap.kernels.pairs import cpu as pairs
from tensortap.kernels.pairs import reference as pairs_reference
from tensortap.kernels.pairs.cpu import PairMeasure, SideMeasure

Array = npt.NDArray[Any]
REAL = [name for name in dtypes.NAMES if not name.startswith("complex")]
FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
EXACT = ("elements", "equal", "exact", "max_abs", "max_abs_index", "reference_value", "candidate_value", "max_ulp")
EXACT += ("row_index",)


def random_bits(name: str, n: int, seed: int) -> Array:
    """Every pattern that the type has: NaN, inf and denormals among them."""
    dtype = dtypes.numpy_dtype(name)
    raw = np.random.default_rng(seed).integers(0, 256, n * dtype.itemsize, dtype=np.uint8)
    if name == "bool":
        raw &= 1
    if name in ("float64", "complex128"):
        raw[7::8] &= 0xBF  # the highest exponent bit off: sums of squares past 1e308 are not defined
    return raw.view(dtype)


def pair(reference: str, candidate: str, shape: tuple[int, ...] | int, error: float = 0.01) -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    values = rng.normal(1, 20, shape)
    if reference.startswith("complex"):
        values = values + 1j * rng.normal(0, 1, shape)
    near = values * (1 + error * rng.normal(0, 1, shape))
    return cast(values, reference), cast(near, candidate)


def cast(values: Array, name: str) -> Array:
    dtype = dtypes.numpy_dtype(name)
    if dtype.kind in "ub" or name == "int8":
        values = np.abs(values)
    return values.astype(dtype)


def agree(found: Any, expected: Any, abs_: float = 0.0) -> bool:
    return bool(found == pytest.approx(expected, rel=1e-11, abs=abs_, nan_ok=True))


def assert_side(found: SideMeasure, expected: SideMeasure) -> None:
    assert astuple(found)[:4] == astuple(expected)[:4]
    size = expected.l2 / math.sqrt(max(expected.elements, 1))
    assert agree(found.mean, expected.mean, 1e-13 * size)
    assert agree(found.std, expected.std, 1e-13 * size)
    assert agree(found.l2, expected.l2)


def assert_matches(reference: Array, candidate: Array, **options: Any) -> PairMeasure:
    found = pairs.difference(reference, candidate, **options)
    options.pop("threads", None)
    expected = pairs_reference.measure(reference, candidate, **options)
    for field in EXACT:
        ours, theirs = getattr(found.difference, field), getattr(expected.difference, field)
        assert ours == theirs or (ours != ours and theirs != theirs), (field, ours, theirs)
    for field in ("rel_l2", "l2", "mismatched", "row_rel_l2"):
        assert agree(getattr(found.difference, field), getattr(expected.difference, field)), field
    assert agree(found.difference.cosine, expected.difference.cosine, 1e-14)
    assert_side(found.reference, expected.reference)
    assert_side(found.candidate, expected.candidate)
    return found


def same(a: PairMeasure, b: PairMeasure) -> bool:
    return repr(a) == repr(b)


@pytest.mark.parametrize("n", [1, 7, 1023, 1025, 5000])
@pytest.mark.parametrize("name", dtypes.NAMES)
def test_every_dtype_and_length(name: str, n: int) -> None:
    assert_matches(random_bits(name, n, 1), random_bits(name, n, 2))
    assert_matches(*pair(name, name, n))


@pytest.mark.parametrize(("reference", "candidate"), list(itertools.permutations(REAL, 2)))
def test_two_dtypes(reference: str, candidate: str) -> None:
    assert_matches(random_bits(reference, 1100, 1), random_bits(candidate, 1100, 2))
    assert_matches(*pair(reference, candidate, 1100))


def test_two_complex_dtypes() -> None:
    found = assert_matches(*pair("complex64", "complex128", (3, 5)))
    assert found.difference.elements == 30
    assert found.difference.max_abs_index is not None
    assert len(found.difference.max_abs_index) == 3


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "complex64", "int64"])
def test_several_chunks(name: str) -> None:
    for n in (pairs.CHUNK, pairs.CHUNK + 1, 2 * pairs.CHUNK + 12345):
        assert_matches(*pair(name, name, n))


def test_empty_and_scalar() -> None:
    for name in dtypes.NAMES:
        dtype = dtypes.numpy_dtype(name)
        for shape in ((0,), (3, 0, 2)):
            found = assert_matches(np.empty(shape, dtype), np.empty(shape, dtype))
            assert found.difference.equal
            assert found.difference.rel_l2 == found.difference.mismatched == 0
        found = assert_matches(np.array(1, dtype), np.array(0, dtype))
        assert found.difference.max_abs == 1
        assert found.difference.max_abs_index == ((0,) if dtype.kind == "c" else ())


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_identical(name: str) -> None:
    array = random_bits(name, 3001, 5)
    found = assert_matches(array, array.copy())
    assert found.difference.equal
    assert (found.difference.l2, found.difference.rel_l2, found.difference.max_abs, found.difference.max_ulp) == (
        0,
    ) * 4
    assert found.difference.cosine == 1
    assert found.difference.mismatched == 0
    assert found.difference.max_abs_index is None
    assert repr(found.reference) == repr(found.candidate)


@pytest.mark.parametrize("place", [0, 1023, 1024, 300_000, 599_999])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool"])
def test_one_wrong_element_is_found(name: str, place: int) -> None:
    reference = cast(np.zeros((2, 3, 100_000)), name)
    candidate = reference.copy()
    candidate.reshape(-1)[place] = 1
    found = assert_matches(reference, candidate).difference
    assert found.max_abs_index == np.unravel_index(place, reference.shape)
    assert (found.reference_value, found.candidate_value, found.equal) == (0, 1, False)
    assert found.mismatched == 1 / 600_000


def test_the_first_of_equal_differences_is_reported() -> None:
    reference = np.zeros(2 * pairs.CHUNK, np.float32)
    candidate = reference.copy()
    candidate[[5000, 7000, pairs.CHUNK + 3]] = [-2, 2, 2]
    for threads in (1, 2):
        assert pairs.difference(reference, candidate, threads=threads).difference.max_abs_index == (5000,)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64", "float8_e5m2"])
def test_non_finite_elements(name: str) -> None:
    reference, candidate = pair(name, name, 5000)
    reference, candidate = np.clip(reference, -99, 99), np.clip(candidate, -99, 99)
    for side in (reference, candidate):
        side[[10, 2000]] = np.nan
        side[1024:2048] = -np.inf  # a whole row of it, as in a mask
        side[4000] = np.inf
    found = assert_matches(reference, candidate).difference
    assert math.isfinite(found.max_abs)
    for wrong in ((np.nan, 1), (1, np.nan), (np.inf, -np.inf), (np.inf, 1), (np.nan, np.inf)):
        reference[[4500, 4600]], candidate[[4500, 4600]] = wrong
        found = assert_matches(reference, candidate).difference
        assert (found.max_abs, found.max_ulp, found.max_abs_index) == (math.inf, math.inf, (4500,))
        assert math.isfinite(found.rel_l2)
        assert not found.equal
    nothing = assert_matches(np.full(3, np.nan, np.float32), np.full(3, np.nan)).difference
    assert (nothing.equal, nothing.cosine, nothing.rel_l2) == (True, 1, 0)


def test_equal_means_bits_in_one_dtype_and_values_in_two() -> None:
    zeros, minus = np.zeros(3000, np.float32), np.full(3000, -0.0, np.float32)
    found = assert_matches(zeros, minus).difference
    assert (found.equal, found.max_abs, found.max_ulp, found.max_abs_index) == (False, 0, 0, None)
    assert pairs.difference(zeros, minus.astype(np.float16)).difference.equal
    assert pairs.difference(np.array([1.5, np.nan]), np.array([1.5, np.nan], np.float16)).difference.equal
    assert not pairs.difference(np.array([0.1]), np.array([0.1], np.float32)).difference.equal
    other_nan = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert not assert_matches(np.array([np.nan], np.float32), other_nan).difference.equal


def test_big_integers_keep_their_last_bit() -> None:
    edges = [0, 1, -1, 2**53, 2**53 + 1, 2**62 + 1, 2**63 - 1, -(2**63), -(2**63) + 1]
    signed = np.array(list(itertools.product(edges, edges)), np.int64)
    assert_matches(signed[:, 0].copy(), signed[:, 1].copy())
    unsigned = np.array(list(itertools.product([0, 1, 2**53 + 1, 2**63, 2**64 - 1, 2**64 - 2], repeat=2)), np.uint64)
    assert_matches(unsigned[:, 0].copy(), unsigned[:, 1].copy())
    mixed = list(itertools.product(edges, [0, 1, 2**53 + 1, 2**63, 2**64 - 1]))
    for k in range(len(mixed)):  # one at a time, so that no great difference hides a small one
        left, right = np.array([mixed[k][0]], np.int64), np.array([mixed[k][1]], np.uint64)
        assert_matches(left, right)
        assert_matches(right, left)
    found = pairs.difference(np.array([2**60]), np.array([2**60 + 1])).difference
    assert (found.equal, found.max_abs, found.max_ulp, found.l2, found.mismatched) == (False, 1, 1, 1, 1)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_units_in_the_last_place_of_every_small_number(name: str) -> None:
    """A number and the one k further: k steps, across zero too, with any neighbours in the row."""
    dtype = dtypes.numpy_dtype(name)
    bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # a signalling NaN
        numbers = bits.view(dtype).astype(np.float64)
    ordered = np.unique(numbers[np.isfinite(numbers)] + 0.0).astype(dtype)
    for k in (1, 5):
        assert assert_matches(ordered[:-k], ordered[k:]).difference.max_ulp == k
        assert pairs.difference(ordered[:-k].astype(np.float64), ordered[k:]).difference.max_ulp == k


def test_units_in_the_last_place_of_wide_numbers() -> None:
    for dtype in (np.float32, np.float64):
        numbers = random_bits(np.dtype(dtype).name, 4000, 9).view(dtype)
        numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) < 1e30)]
        assert assert_matches(numbers, np.nextafter(numbers, dtype(np.inf))).difference.max_ulp == 1
    tiny = np.array([-5e-324, 5e-324])
    assert assert_matches(tiny, tiny[::-1].copy()).difference.max_ulp == 2
    # Rounded to the coarser type first: half a unit of bfloat16 goes to even, a little more goes up.
    ones = np.ones(2, ml_dtypes.bfloat16)
    assert pairs.difference(np.array([1 + 2**-8] * 2, np.float32), ones).difference.max_ulp == 0
    assert pairs.difference(np.array([1 + 2**-8 + 2**-20] * 2, np.float32), ones).difference.max_ulp == 1


def test_tiny_distances_survive_in_the_cosine() -> None:
    reference = np.random.default_rng(0).normal(0, 1, 100_000)
    side = np.random.default_rng(1).normal(0, 1, 100_000)
    side -= reference * (side @ reference) / (reference @ reference)
    candidate = reference + 1e-7 * side
    expected = 0.5 * 1e-14 * (side @ side) / (reference @ reference)
    assert 1 - pairs.difference(reference, candidate).difference.cosine == pytest.approx(expected, rel=0.05)
    for factor, cosine in ((-1, -1), (3, 1), (0, 0), (-1e12, -1), (1e-12, 1)):
        assert pairs.difference(reference, factor * reference).difference.cosine == pytest.approx(cosine, abs=1e-14)
    zeros = np.zeros(5)
    assert pairs.difference(zeros, zeros.astype(np.float32)).difference.cosine == 1
    assert pairs.difference(zeros, zeros + 1).difference.rel_l2 == math.inf


def test_moments_lose_nothing() -> None:
    constant = np.full(300_001, 0.1)
    found = pairs.difference(constant, constant + 0.1)
    assert (found.reference.mean, found.reference.std, found.candidate.std) == (0.1, 0, 0)
    spread = np.random.default_rng(0).normal(1e4, 1, 600_000)
    spread[::1024] = -1e6  # each row begins with an outlier
    assert_matches(spread, spread + 1e-3)


@pytest.mark.parametrize("options", [{"rtol": 0.0}, {"atol": 0.5}, {"rtol": 0.1, "atol": 0.2}, {"rtol": 0, "atol": 0}])
@pytest.mark.parametrize("name", ["float32", "float16", "int64", "complex128"])
def test_tolerances_are_taken(name: str, options: dict[str, float]) -> None:
    assert_matches(*pair(name, name, 3000, error=0.1), **options)


def test_the_usual_tolerances() -> None:
    assert pairs.tolerances("float32", "float32") == (1.3e-6, 1e-5)
    assert pairs.tolerances("complex128", "complex128") == (1e-7, 1e-7)
    assert pairs.tolerances("float16", "bfloat16") == (1.6e-2, 1e-5)
    assert pairs.tolerances("int64", "bool") == (0, 0)
    assert pairs.tolerances("float32", "float8_e4m3fn") == (0.25, 2**-9)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "complex64", "bool"])
def test_any_layout_in_memory(name: str) -> None:
    reference, candidate = pair(name, name, (37, 41, 3))
    raw = np.zeros(reference.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(reference.dtype).reshape(reference.shape)
    unaligned[...] = reference
    expected = pairs.difference(reference, candidate)
    assert same(pairs.difference(unaligned, candidate), expected)
    assert same(pairs.difference(np.asfortranarray(reference), candidate), expected)
    assert same(pairs.difference(reference, candidate.astype(candidate.dtype.newbyteorder(">"))), expected)
    reference.flags.writeable = False
    for view in (np.s_[::-1], np.s_[:, ::2, ::-1], np.s_[5:, 3:, 1:], np.s_[3]):
        assert_matches(reference[view], candidate[view])
    assert_matches(reference.T, candidate.T)
    assert_matches(np.broadcast_to(reference[0, 0, 0], (7, 9)), np.broadcast_to(candidate[0, 0], (7, 3))[:, [0] * 9])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_threads_do_not_change_a_bit(name: str) -> None:
    reference, candidate = pair(name, name, 5 * pairs.CHUNK + 77)
    alone = pairs.difference(reference, candidate, threads=1)
    for threads in (2, 3, None):
        assert same(pairs.difference(reference, candidate, threads=threads), alone)


@pytest.mark.parametrize("name", ["float32", "complex64"])
def test_ranges_join_to_the_same_bits(name: str) -> None:
    reference, candidate = pair(name, name, (2, 1_000_000))
    candidate[1, 7], reference[1, 800_000] = np.nan, np.inf
    shape = (2, 1_000_000, 2) if name == "complex64" else (2, 1_000_000)
    r, c = reference.reshape(-1), candidate.reshape(-1)
    cuts = [0, pairs.CHUNK, 4 * pairs.CHUNK, 5 * pairs.CHUNK, r.size]
    rows = pairs.TensorRows.of(reference.shape, len(shape) - 1, size=9.0)
    partials = [pairs.measure_range(r[a:b], c[a:b], a, rows=rows) for a, b in itertools.pairwise(cuts)]
    whole = pairs.difference(reference, candidate, size=9.0)
    assert same(pairs.join(partials, shape, rows), whole)
    assert same(pairs.join(pickle.loads(pickle.dumps(partials[::-1])), shape, rows), whole)  # noqa: S301
    assert pairs.join(partials).difference.max_abs_index == (int(np.ravel_multi_index(*whole_index(whole, shape))),)


def whole_index(measure: PairMeasure, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert measure.difference.max_abs_index is not None
    return measure.difference.max_abs_index, shape


# --- rows ----------------------------------------------------------------------------------------------------------
SHAPES: list[tuple[int, ...]] = [(3, 7), (5, 1), (64, 32, 1, 1), (700, 3), (9000, 2), (37, 64), (50, 768), (3, 1024)]
SHAPES += [(2, 300_000), (300, 2048), (1000, 1000), (3, pairs.CHUNK), (131, 4001), (2, 2, 250_000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "int64", "complex64", "bool"])
def test_the_worst_row(name: str, shape: tuple[int, ...]) -> None:
    """Rows of any length, cut by the kernel's own rows and chunks, among them equal ones and such with NaN and Inf."""
    reference, candidate = pair(name, name, shape)
    assert_matches(reference, candidate)
    same_places = np.random.default_rng(1).random(shape) < 0.5
    candidate[same_places] = reference[same_places]
    candidate[1:] = reference[1:]
    if reference.dtype.kind not in "iub":
        flat, other = candidate.reshape(-1), reference.reshape(-1)
        flat[2], other[3], flat[-1], other[-1] = np.nan, np.inf, np.inf, np.inf
    assert_matches(reference, candidate)


def test_one_wrong_row_among_many_right_ones() -> None:
    reference = np.random.default_rng(0).normal(0, 1, (40, 50, 96)).astype(np.float32)
    candidate = reference.copy()
    candidate[17, 31] *= np.float32(1.5)
    found = assert_matches(reference, candidate).difference
    assert found.row_index == (17, 31)
    assert found.row_rel_l2 == pytest.approx(0.5)
    assert found.rel_l2 < 0.02
    candidate[17, 31], candidate[29, 3] = 2 * reference[17, 31], 2 * reference[29, 3]
    assert pairs.difference(reference, candidate).difference.row_index == (17, 31), "the first of two alike"


def test_a_row_that_is_nearly_zero_does_not_shout() -> None:
    reference = np.ones((64, 100))
    reference[5] = 1e-9
    candidate = reference + 1e-9
    found = assert_matches(reference, candidate).difference
    assert found.row_index == (5,)
    assert found.row_rel_l2 == pytest.approx(1e-9 / pairs_reference.ROW_FLOOR, rel=0.01)


def test_tensors_of_one_row() -> None:
    for shape in ((), (1,), (7,), (1, 9), (9, 1), (1, 1, 1)):
        found = assert_matches(*pair("float32", "float32", shape)).difference
        assert found.row_index == ((0,) if shape == (1, 9) else ())
        assert found.row_rel_l2 == pytest.approx(found.rel_l2, rel=1e-12)
    found = assert_matches(np.ones((3, 4)), np.ones((3, 4))).difference
    assert (found.row_rel_l2, found.row_index) == (0, None)
    found = assert_matches(np.zeros((3, 4)), np.eye(3, 4)).difference
    assert (found.row_rel_l2, found.row_index) == (math.inf, (0,))


def test_rows_whose_squares_float64_does_not_hold() -> None:
    """They are no longer distinguished, but nothing hangs or raises."""
    reference = np.full((400, 5), 1e200)
    found = pairs.difference(reference, -reference).difference
    assert (found.equal, found.max_abs, found.row_rel_l2) == (False, 2e200, 0)


def test_where_ranges_are_cut_does_not_change_a_row() -> None:
    """The same bits from few ranges and many, for rows much longer and much shorter than a chunk."""
    for shape in ((3, 700_001), (7_001, 300), (1_050_000, 2)):
        reference, candidate = pair("float32", "float32", shape)
        r, c = reference.reshape(-1), candidate.reshape(-1)
        rows = pairs.TensorRows.of(shape, 1, size=1e4)
        whole = pairs.difference(reference, candidate, size=1e4)
        for chunks in (1, 3, 5):
            step = chunks * pairs.CHUNK
            options: dict[str, Any] = {"rows": rows, "threads": 1 + chunks % 2}
            parts = [
                pairs.measure_range(r[a : a + step], c[a : a + step], a, **options) for a in range(0, r.size, step)
            ]
            assert same(pairs.join(parts[::-1], shape, rows), whole)


def test_release_ends_the_helpers() -> None:
    reference, candidate = pair("float32", "float32", 4 * pairs.CHUNK)
    before = pairs.difference(reference, candidate, threads=3)
    pairs.release()
    pairs.release()
    assert not any(thread.name.startswith("tensortap-pairs") for thread in threading.enumerate())
    assert same(pairs.difference(reference, candidate, threads=3), before)


def test_incomparable_arrays_raise() -> None:
    floats = np.ones(3, np.float32)
    with pytest.raises(UsageError, match=r"shapes \(3,\) and \(2,\)"):
        pairs.difference(floats, floats[:2])
    with pytest.raises(UsageError, match=r"dtype datetime64.*; supported are float64, .*bfloat16"):
        pairs.difference(floats, np.zeros(3, "M8[s]"))
    with pytest.raises(UsageError, match="only one is complex"):
        pairs.difference(floats, floats.astype(np.complex64))
    with pytest.raises(UsageError, match="threads must be 1 or more, not 0"):
        pairs.difference(floats, floats, threads=0)
    with pytest.raises(UsageError, match="must be 0 or more"):
        pairs.difference(floats, floats, rtol=-1)
    with pytest.raises(UsageError, match="must be 0 or more"):
        pairs.difference(floats, floats, atol=math.nan)

"""The compiled kernel against the definition: digests bit for bit, the rest within rounding."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tensortap.core import dtypes
from tensortap.core.records import Summary
from tensortap.errors import UsageError
from tensortap.kernels.summary import cpu, reference

Array = npt.NDArray[Any]
CHUNK = 256 * 1024
EXACT = ("elements", "nan", "posinf", "neginf", "zeros", "edge", "digest")


def random_bits(name: str, n: int) -> Array:
    """Every pattern that the type has: NaN, inf and denormals among them."""
    dtype = dtypes.numpy_dtype(name)
    raw = np.random.default_rng(n).integers(0, 256, n * dtype.itemsize, dtype=np.uint8)
    if name == "bool":
        raw &= 1
    if name in ("float64", "complex128"):
        raw[7::8] &= 0xBF  # the highest exponent bit off: sums of squares past 1e308 are not defined
    return raw.view(dtype)


def random_values(name: str, shape: tuple[int, ...] | int) -> Array:
    rng = np.random.default_rng(3)
    dtype = dtypes.numpy_dtype(name)
    values = rng.normal(1, 3, shape)
    if dtype.kind == "c":
        return (values + 1j * rng.normal(0, 1, shape)).astype(dtype)
    return (np.abs(values) if dtype.kind in "ub" else values).astype(dtype)


def assert_matches(array: Array, threads: int | None = None) -> Summary:
    found, expected = cpu.summarize(array, threads), reference.summarize(array)
    for field in EXACT:
        assert getattr(found, field) == getattr(expected, field), field
    for field in ("min", "max"):
        assert np.array_equal(getattr(found, field), getattr(expected, field), equal_nan=True), field
    for field in ("std", "l1", "l2"):
        assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=1e-11, nan_ok=True), field
    near_zero = 1e-13 * expected.l1 / max(expected.finite, 1)
    assert found.mean == pytest.approx(expected.mean, rel=1e-11, abs=near_zero, nan_ok=True)
    assert found.sketch.dtype == np.float32
    overflow = ~np.isfinite(expected.sketch)
    assert np.array_equal(found.sketch[overflow], expected.sketch[overflow], equal_nan=True)
    ours, theirs = found.sketch[~overflow].astype(np.float64), expected.sketch[~overflow].astype(np.float64)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=3e-7 * np.sqrt(np.mean(theirs**2)) if theirs.size else 0)
    return found


@pytest.mark.parametrize("n", [1, 7, 1023, 1024, 1025, 20_000])
@pytest.mark.parametrize("name", dtypes.NAMES)
def test_every_dtype_and_length(name: str, n: int) -> None:
    assert_matches(random_bits(name, n))
    assert_matches(random_values(name, n))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "float64", "complex64", "int32"])
def test_several_chunks(name: str) -> None:
    for n in (CHUNK, CHUNK + 1, 2 * CHUNK + 12345):
        assert_matches(random_values(name, n))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "uint16"])
def test_every_value_of_a_small_dtype(name: str) -> None:
    """One bucket at a time would hide a wrong conversion, so each value is summarised alone."""
    dtype = dtypes.numpy_dtype(name)
    bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    assert_matches(bits.view(dtype))
    for i in range(0, bits.size, 1 if dtype.itemsize == 1 else 97):
        value = bits[i : i + 1].view(dtype)
        found = cpu.summarize(value)
        if found.finite:
            known = float(value[0].astype(np.float64))
            assert found.min == found.max == known, hex(i)
            assert found.edge or found.mean == known, hex(i)  # the edge of the range is left out of the moments


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "int16"])
def test_rows_that_differ_from_their_neighbours(name: str) -> None:
    """Rows are added four at a time, unless one of the four is not ordinary or far from zero."""
    rows = random_values(name, (23, 1024))
    floats = dtypes.numpy_dtype(name).kind != "i"
    rows[1] = 7
    rows[6] = rows[6] + np.asarray(1000).astype(rows.dtype)
    rows[9] = 0
    if floats:
        rows[12, 500], rows[17, 3], rows[20, 1023] = np.nan, -np.inf, 3e38 if name != "float64" else 1e308
    for first in range(5):
        for last in (23, 22, 14):
            assert_matches(rows[first:last])
    assert_matches(rows[2:].reshape(-1)[:-5])
    assert_matches(np.full((9, 1024), 3).astype(rows.dtype))


def test_a_variance_far_below_the_mean_keeps_its_digits() -> None:
    noise = np.random.default_rng(2).standard_normal((16, 1024))
    for mean in (1.0, 30.0, 1000.0, 1e6):
        assert_matches((noise + mean).astype(np.float32))
        assert_matches(noise + mean / 10)


def test_empty_and_scalar() -> None:
    for name in dtypes.NAMES:
        dtype = dtypes.numpy_dtype(name)
        for array in (np.empty((0,), dtype), np.empty((3, 0, 2), dtype), np.ones((), dtype)):
            assert_matches(array)
    empty = cpu.summarize(np.empty((0, 4), np.float32))
    assert (empty.elements, empty.digest, empty.l1, empty.l2) == (0, 0, 0, 0)
    assert all(math.isnan(x) for x in (empty.min, empty.max, empty.mean, empty.std))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "complex64", "bool"])
def test_any_layout_in_memory(name: str) -> None:
    array = random_values(name, (37, 41, 3))
    frozen = array.copy()
    frozen.flags.writeable = False
    raw = np.zeros(array.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    layouts = [
        array.T,
        array[::-1],
        array[:, ::2, ::-1],
        array[5:, 3:, 1:],
        np.broadcast_to(array[0, 0], (50, 3)),
        np.broadcast_to(array[0, 0, 0], (7, 9)),
        np.asfortranarray(array),
        array.astype(array.dtype.newbyteorder(">")),
        frozen,
        unaligned,
        array.reshape(-1)[1:],
    ]
    for layout in layouts:
        before = layout.tobytes()
        found = assert_matches(layout)
        assert found.digest == cpu.summarize(layout.astype(array.dtype, order="C")).digest
        assert layout.tobytes() == before


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_non_finite_elements(dtype: Any) -> None:
    array = random_values("float32", 5000).astype(dtype)
    array[[0, 17, 4999]] = np.nan
    array[1024:1030] = np.inf
    array[2048:3072] = -np.inf  # a whole row of them
    array[3072:3080] = [np.inf, -np.inf] * 4
    array[4000:4010] = 0
    array[4010:4012] = -0.0
    found = assert_matches(array)
    assert (found.nan, found.posinf, found.neginf, found.zeros) == (3, 10, 1028, 12)
    assert found.finite == 5000 - 1041
    for value in (np.nan, np.inf, -np.inf):
        assert_matches(np.full(3000, value, dtype))


def test_denormals_are_numbers() -> None:
    found = assert_matches(np.full(2000, 1e-42, np.float32))
    assert found.zeros == 0
    assert found.min == np.float32(1e-42)
    half = assert_matches(np.array([2**-24, -(2**-24), 0], np.float16))
    assert (half.zeros, half.max, half.min) == (1, 2**-24, -(2**-24))


def test_huge_values() -> None:
    sign = np.where(np.arange(70_000) % 3 == 0, -1, 1)
    for dtype, value in ((np.float32, 3e38), (ml_dtypes.bfloat16, 3e38), (np.float16, 65504), (np.float64, 1e30)):
        found = assert_matches((sign * value).astype(dtype))
        assert math.isfinite(found.l2)
    for value in (2**63 - 1, -(2**63)):
        assert_matches(np.full(100, value, np.int64))
    assert_matches(np.full(100, 2**64 - 1, np.uint64))
    assert cpu.summarize(np.array([3e150, -4e150])).l2 == pytest.approx(5e150)
    # Sums overflow float64 here: whatever is said, nothing may be counted as missing.
    assert cpu.summarize(np.full(3000, 1.7e308)).finite == 3000


@pytest.mark.parametrize("value", [0.1, -3.3e7, 1e-40, 0.0])
def test_constants_have_no_spread(value: float) -> None:
    found = assert_matches(np.full(300_001, value, np.float32))
    assert found.std == 0
    assert found.mean == found.min == np.float32(value)


def test_a_large_mean_keeps_its_small_spread() -> None:
    array = np.random.default_rng(0).normal(1e4, 1, 600_000).astype(np.float32)
    found = assert_matches(array)
    assert found.std == pytest.approx(float(array.astype(np.float64).std()), rel=1e-9)


def assert_identical(a: Summary, b: Summary) -> None:
    for field in (*EXACT, "min", "max", "mean", "std", "l1", "l2"):
        assert np.array_equal(getattr(a, field), getattr(b, field), equal_nan=True), field
    assert a.sketch.tobytes() == b.sketch.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
def test_threads_do_not_change_a_bit(dtype: Any) -> None:
    array = np.random.default_rng(1).normal(0, 1, 9 * CHUNK + 77).astype(dtype)
    alone = cpu.summarize(array, threads=1)
    for threads in (2, 3, 8, None):
        for _ in range(3):
            assert_identical(cpu.summarize(array, threads), alone)


def test_many_callers_at_once() -> None:
    arrays = [np.random.default_rng(i).normal(0, 1, 3 * CHUNK + i).astype(np.float32) for i in range(8)]
    alone = [cpu.summarize(array, threads=1) for array in arrays]
    start = threading.Barrier(8)

    def call(array: Array) -> list[Summary]:
        start.wait()
        return [cpu.summarize(array) for _ in range(5)]

    with ThreadPoolExecutor(8) as callers:
        for expected, found in zip(alone, callers.map(call, arrays), strict=True):
            for summary in found:
                assert_identical(summary, expected)


def test_release_ends_the_helpers() -> None:
    array = np.ones(4 * CHUNK, np.float32)
    before = cpu.summarize(array, threads=3)
    assert any(thread.name.startswith("tensortap-summary") for thread in threading.enumerate())
    cpu.release()
    cpu.release()
    assert not any(thread.name.startswith("tensortap-summary") for thread in threading.enumerate())
    assert_identical(cpu.summarize(array, threads=3), before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_starts_its_own_helpers() -> None:
    array = np.random.default_rng(5).normal(0, 1, 4 * CHUNK).astype(np.float32)
    expected = cpu.summarize(array, threads=3)  # the parent's helpers are running now
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        digest = 0
        try:
            digest = cpu.summarize(array, threads=3).digest
        finally:
            os.write(writing, str(digest).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert int(pipe.read()) == expected.digest
    os.waitpid(child, 0)


@pytest.mark.parametrize("array", [np.zeros(3, "M8[s]"), np.array(["a"]), np.zeros(3, np.longdouble), np.array([{}])])
def test_an_unknown_dtype_is_named(array: Array) -> None:
    with pytest.raises(UsageError, match=r"cannot summarise elements of dtype .*; supported are float64, .*bfloat16"):
        cpu.summarize(array)


def test_no_threads_are_refused() -> None:
    with pytest.raises(UsageError, match="threads must be 1 or more, not 0"):
        cpu.summarize(np.ones(3), threads=0)

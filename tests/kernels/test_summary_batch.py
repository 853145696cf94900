"""Arrays that are summarised together have the summaries that each has alone, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from tensortap.core import dtypes, statistics
from tensortap.kernels import summarize
from tensortap.kernels.summary.batch import MOST_COPIED, SummaryBatch, layout_address

SIZES = (1, 2, 7, 8, 63, 64, 65, 200, 256, 1000, 1023, 1024, 1025, 3000, 4096, 40_000, 600_001)
"""The largest ones are read instead of copied, the last one in three chunks."""


def arrays(name: str) -> Iterator[npt.NDArray[np.generic]]:
    """Yield arrays with NaN, infinities and numbers at the edge of the range, a constant one, and one of zeros."""
    dtype = dtypes.numpy_dtype(name)
    random = np.random.default_rng(7)
    for size in SIZES:
        values = random.standard_normal(size) * 100
        if dtype.kind in "fV" and size > 60:
            values[[3, 5, 9, 11]] = np.nan, np.inf, -np.inf, 3e38
        with np.errstate(all="ignore"):
            yield values.astype(dtype)
    yield np.full(70, 3).astype(dtype)
    yield np.zeros(5, dtype)


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_a_batch_computes_what_a_single_call_does(name: str) -> None:
    layout = layout_address(dtypes.numpy_dtype(name))
    if layout is None:
        assert name.startswith("complex")
        return
    batch, whole = SummaryBatch(), list(arrays(name))
    rows = [batch.add(each.ctypes.data, each.size, each.nbytes, layout) for each in whole]
    assert rows == list(range(len(whole))) and len(batch) == len(whole)
    columns = batch.columns()
    for row, each in enumerate(whole):
        alone = summarize(each)
        for statistic in statistics.STORED:
            assert np.array_equal(columns[statistic.name][row], alone[statistic.name], equal_nan=True), statistic.name
        assert columns["sketch"][row].tobytes() == alone.sketch.tobytes()


def test_a_copy_is_recognised_by_every_byte() -> None:
    array = np.arange(100, dtype=np.float32)
    batch, layout = SummaryBatch(), layout_address(array.dtype)
    assert layout is not None
    row = batch.add(array.ctypes.data, array.size, array.nbytes, layout)
    assert row is not None and batch.is_copy(row, array.ctypes.data)
    for place in (0, 50, 99):
        array.view(np.uint32)[place] ^= 1
        assert not batch.is_copy(row, array.ctypes.data)
        array.view(np.uint32)[place] ^= 1
    assert batch.is_copy(row, array.ctypes.data)


def test_an_array_that_was_read_is_recognised_by_a_few_elements_and_by_its_digest() -> None:
    array = np.random.default_rng(1).standard_normal(300_000).astype(np.float32)
    batch, layout = SummaryBatch(), layout_address(array.dtype)
    assert layout is not None
    row = batch.add(array.ctypes.data, array.size, array.nbytes, layout)
    assert row is not None and batch.is_copy(row, array.ctypes.data)
    assert batch.digest(row) == summarize(array).digest
    array *= 1.5
    assert not batch.is_copy(row, array.ctypes.data)
    again = batch.add(array.ctypes.data, array.size, array.nbytes, layout)
    assert again == row + 1 and batch.digest(again) == summarize(array).digest != batch.digest(row)
    assert list(batch.columns()["digest"]) == [batch.digest(row), batch.digest(again)]


def test_a_full_batch_takes_nothing_more() -> None:
    array = np.zeros(MOST_COPIED // 4, np.float32)
    batch, layout = SummaryBatch(), layout_address(array.dtype)
    assert layout is not None
    while batch.add(array.ctypes.data, array.size, array.nbytes, layout) is not None:
        pass
    assert 1 < len(batch) < 1000 and len(batch.columns()["digest"]) == len(batch)

"""`write_npy` writes the files of `np.save`, bit for bit."""

from __future__ import annotations

import io

import numpy as np
import pytest

from tensortap.core import dtypes
from tensortap.store.exports.plain import widen, write_npy


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
@pytest.mark.parametrize("name", dtypes.NAMES)
def test_the_file_is_that_of_numpy(name: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtypes.numpy_dtype(name))
    for each in (array, array.T, array[::-1] if shape else array):
        written, expected = io.BytesIO(), io.BytesIO()
        write_npy(written, each)
        np.save(expected, np.asarray(widen(each), order="C"))
        assert written.getvalue() == expected.getvalue()

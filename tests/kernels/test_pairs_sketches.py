"""Many pairs of sketches at once."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.errors import UsageError
from tensortap.kernels.pairs.sketches import sketch_differences


def test_distances_of_chosen_rows() -> None:
    rng = np.random.default_rng(0)
    r, c = rng.normal(0, 1, (50, 256)).astype(np.float32), rng.normal(0, 1, (70, 256)).astype(np.float32)
    r_rows, c_rows = rng.integers(-1, 50, 1000), rng.integers(-1, 70, 1000)
    expected = np.linalg.norm(r[r_rows].astype(np.float64) - c[c_rows], axis=1)
    expected[(r_rows < 0) | (c_rows < 0)] = np.nan
    np.testing.assert_allclose(sketch_differences(r, r_rows, c, c_rows), expected, rtol=1e-13)
    c[3, 5] = np.inf
    assert sketch_differences(r, np.array([0]), c, np.array([3]))[0] == np.inf


def test_none_at_all() -> None:
    nothing, rows = np.empty((0, 0), np.float32), np.full(3, -1)
    assert np.isnan(sketch_differences(nothing, rows, nothing, rows)).all()
    assert sketch_differences(nothing, rows[:0], nothing, rows[:0]).shape == (0,)


def test_sketches_that_do_not_form_pairs_raise() -> None:
    r, c = np.zeros((2, 256), np.float32), np.zeros((2, 96), np.float32)
    rows = np.zeros(2, np.int64)
    with pytest.raises(UsageError, match="256 buckets cannot be folded to 96"):
        sketch_differences(r, rows, c, rows)
    with pytest.raises(UsageError, match="2 and 1 rows do not form pairs"):
        sketch_differences(r, rows, r, rows[:1])
    with pytest.raises(UsageError, match="row 2 of 2 sketches"):
        sketch_differences(r, rows + 2, r, rows)

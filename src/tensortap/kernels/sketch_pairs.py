"""The compiled loop over pairs of sketches: how far apart many tensors are by what was kept of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensortap.kernels.rows import _compiled, _entry
from tensortap.kernels.vectors import take

__all__ = ["PAIRS", "apart"]

PAIRS = 64
"""Pairs that a thread takes at once."""
_REORDER = {"reassoc", "nsz", "contract"}


@_compiled(fastmath=_REORDER)
def _distance(a: Any, b: Any) -> Any:
    total = 0.0
    for i in range(a.size):
        gap = np.float64(a[i]) - np.float64(b[i])
        total += gap * gap
    return total


@_entry
def apart(r: Any, r_rows: Any, c: Any, c_rows: Any, counter: int, out: Any) -> None:
    """The distances of many pairs of sketches, by their rows in two matrices. Many threads may run it at once."""
    while True:
        first = take(counter) * PAIRS
        if first >= out.size:
            return
        for i in range(first, min(first + PAIRS, out.size)):
            if r_rows[i] < 0 or c_rows[i] < 0:
                out[i] = np.nan
            else:
                out[i] = np.sqrt(_distance(r[r_rows[i]], c[c_rows[i]]))

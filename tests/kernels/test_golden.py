"""The definition, held by literals: stored summaries stay comparable, or VERSION changes.

If a test here fails, the definition changed. Either undo that, or raise `reference.VERSION` and write new literals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tensortap.core import dtypes
from tensortap.core.placement import Placement
from tensortap.kernels.summary import cpu, reference


def inputs() -> dict[str, tuple[npt.NDArray[Any], Placement | None]]:
    """Values that need no random generator, whose stream may change with NumPy's version."""
    steps = (np.arange(5000) * 37 % 1009 - 504) / 16  # exact in float32
    small = np.arange(3000) % 251 - 125
    grid = steps[:60].reshape(6, 10).astype(np.float32)
    return {
        "float32": (steps.astype(np.float32), None),
        "float64": (steps, None),
        "bfloat16": (small.astype(dtypes.numpy_dtype("bfloat16")), None),
        "float8_e5m2": (small.astype(dtypes.numpy_dtype("float8_e5m2")), None),
        "int64": (small.astype(np.int64), None),
        "bool": (small % 3 == 0, None),
        "complex64": ((steps[:777] + 1j * steps[777:1554]).astype(np.complex64), None),
        "a block": (grid, Placement.of_block((2**20, 2**23), (2**19, 12345), (6, 10))),
    }


# digest, then of the sketch: the bucket of the largest size, its value, how many are positive
GOLDEN: dict[str, tuple[int, int, float, int]] = {
    "float32": (0x4431D46B3B468000, 27, -235.8125, 125),
    "float64": (0x377E5585B9611000, 27, -235.8125, 125),
    "bfloat16": (0x34B073ED14679DDC, 3, -715.0, 121),
    "float8_e5m2": (0x5793925D7F68A07A, 3, -683.0, 119),
    "int64": (0x4F9B99E74E6418AE, 3, -715.0, 121),
    "bool": (0x562A41B95F466AB4, 12, 6.0, 102),
    "complex64": (0x999F3F46B8930000, 234, 161.25, 121),
    "a block": (0x54D4839112958000, 81, -31.5, 23),
}


def test_version() -> None:
    assert reference.VERSION == 3


@pytest.mark.parametrize("name", inputs())
def test_golden(name: str) -> None:
    array, part = inputs()[name]
    digest, bucket, value, positive = GOLDEN[name]
    found = [reference.summarize(array, part)]
    if part is None:
        found.append(cpu.summarize(array))
    for summary in found:
        assert summary.digest == digest
        assert int(np.abs(summary.sketch).argmax()) == bucket
        assert float(summary.sketch[bucket]) == value  # sums of few short numbers: exact in any order
        assert int((summary.sketch > 0).sum()) == positive


def test_weights() -> None:
    weights = reference.digest_weights()[[0, 1, 2, 255]]
    assert [hex(w) for w in weights.tolist()] == ["0xe220a839", "0xee789e6b", "0x86c45d19", "0x8807e7c5"]

"""The definition, held by literals: stored summaries stay comparable, or VERSION changes.

If a test here fails, the definition changed. Either undo that, or raise `reference.VERSION` and write new literals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tensortap import dtypes
from tensortap.kernels import cpu, reference
from tensortap.kernels.reference import Part


def inputs() -> dict[str, tuple[npt.NDArray[Any], Part | None]]:
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
        "a block": (grid, Part((2**20, 2**23), (2**19, 12345))),
    }


# digest, then of the sketch: the bucket of the largest size, its value, how many are positive
GOLDEN: dict[str, tuple[int, int, float, int]] = {
    "float32": (0xFEA9546ACFAF8000, 68, 212.125, 128),
    "float64": (0x1A6207B71B6C1000, 68, 212.125, 128),
    "bfloat16": (0xE3871F6D8D9A2C30, 96, 707.0, 117),
    "float8_e5m2": (0x498960B4514380AE, 96, 704.0, 120),
    "int64": (0x27240D44A55DE6F4, 96, 707.0, 117),
    "bool": (0x1BB20CC553BCEFEC, 87, -6.0, 87),
    "complex64": (0x781DD88BC14E0000, 155, -114.4375, 124),
    "a block": (0x2881960A5B4D8000, 81, -31.5, 31),
}


def test_version() -> None:
    assert reference.VERSION == 1


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

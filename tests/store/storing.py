"""Records to write, with contents that follow from their number."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from tensortap.core import dtypes
from tensortap.core.records import Key, Location, Record, Summary
from tensortap.store import RunWriter


def summary(number: int = 0, elements: int = 4, **changes: Any) -> Summary:
    values: dict[str, Any] = {
        "elements": elements,
        "nan": 0,
        "posinf": 0,
        "neginf": 0,
        "zeros": 1,
        "edge": 0,
        "min": -1.5,
        "max": 2.5,
        "mean": float(number),
        "std": 0.1,
        "l1": 3.0,
        "l2": 4.0,
        "digest": (number * 0x9E3779B97F4A7C15) % 2**64,
        "sketch": np.full(256, number, np.float32),
    }
    return Summary(**{**values, **changes})


def record(number: int = 0, array: Any = None, location: Location | None = None, **changes: Any) -> Record:
    step = changes.pop("step", 0)
    module = changes.pop("module", f"layers.{number}")
    kind = changes.pop("kind", "output")
    values: dict[str, Any] = {
        "key": Key(step, 0, "forward", module, 0, kind, "0"),
        "rank": 0,
        "seq": number,
        "cls": "Linear",
        "dtype": "float32" if array is None else dtypes.name_of(array.dtype),
        "shape": (2, 2) if array is None else array.shape,
        "tensor": number,
        "summary": summary(number),
        "location": location,
    }
    return Record(**{**values, **changes})


def write(path: Path, count: int = 3, **options: Any) -> None:
    """A small finished run: tensors 0..count-1, each filled with its number."""
    with RunWriter(path, info={}, **options) as writer:
        for number in range(count):
            array = np.full((2, 2), number, np.float32)
            where = writer.put(f"tensor {number}", array, step=0)
            writer.append(record(number, array, where, rank=options.get("rank", 0)))


def same(left: Record, right: Record) -> bool:
    """Equal in every field; NaN equals NaN."""
    plain = ("key", "rank", "seq", "cls", "dtype", "shape", "tensor", "location")
    if any(getattr(left, name) != getattr(right, name) for name in plain):
        return False
    names = [field.name for field in fields(Summary) if field.name != "more"]
    if left.summary.more != right.summary.more:
        return False
    return all(np.array_equal(getattr(left.summary, n), getattr(right.summary, n), equal_nan=True) for n in names)

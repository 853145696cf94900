"""Compressed blocks of data inside the page, each under its own id, so that scripts unpack only what they need."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["DataBlock", "json_block", "numbers"]

_LEVEL = 6


@dataclass(frozen=True)
class DataBlock:
    """Gzipped bytes under an id."""

    id: str
    data: bytes

    @classmethod
    def of(cls, id: str, raw: bytes) -> DataBlock:
        return cls(id, gzip.compress(raw, _LEVEL, mtime=0))

    def element(self) -> str:
        """Return an element that browsers keep as text. Base64 has no character that could end it."""
        return f'<script type="application/gzip;base64" id="{self.id}">{base64.b64encode(self.data).decode()}</script>'


def json_block(id: str, value: Any) -> DataBlock:
    return DataBlock.of(id, json.dumps(numbers(value), separators=(",", ":"), allow_nan=False).encode())


def numbers(value: Any) -> Any:
    """Replace NaN and infinities with words that `Number(...)` of the scripts reads."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): numbers(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers(each) for each in value]
    return value

"""What the definition makes of positions: the digest of a line of 1024 bytes, and the signs and slots of groups.

A row of 1024 elements has 128 groups of 8. Constants of the definition are passed as tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensortap.kernels.jit import compiled
from tensortap.kernels.vectors import add_signed

__all__ = ["WEIGHTS", "add_row", "digest_line", "line_hash", "mix", "moved_by", "sign_key", "signs_of_row"]

WEIGHTS = 64
"""Offset of the digest's weights among the constants: 1024 bytes for each order of a line's groups in their slots.
Elements of one byte have 128 orders, wider ones 64, 32 and 16."""


@compiled()
def mix(x: Any) -> Any:
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@compiled()
def line_hash(line: Any, golden: Any) -> Any:
    z = line + golden
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) & np.uint64(0xFFFFFFFF)) | np.uint64(1)


@compiled()
def digest_line(words: Any, weights: Any) -> Any:
    total = np.uint64(0)
    for i in range(256):
        total += np.uint64(words[i]) * np.uint64(weights[i])  # both 32 bits wide: one vector multiply
    return total


@compiled()
def sign_key(row: int, seed: Any) -> Any:
    """Return what gives the signs of a row's groups: those of a slot are mix((low + slot) ^ key) >> shift."""
    first = np.uint64(row >> 2) * np.uint64(128)
    key = np.uint32(mix(np.uint32(first >> np.uint64(32))) ^ np.uint32(seed))
    return np.uint32(first), key, np.uint32(8 * (row & 3))


@compiled()
def signs_of_row(row: int, seed: Any, out: Any) -> None:
    """Compute the sign bits of the 128 slots, for the group of four rows that has this row."""
    low, key, _ = sign_key(row, seed)
    for i in range(128):
        out[i] = mix(np.uint32(np.uint32(low + np.uint32(i)) ^ key))


@compiled()
def moved_by(row: int, seed: Any) -> Any:
    """Return the number that maps the row's groups to slots by XOR."""
    return _moved_from(row, np.uint32(mix(np.uint32(np.uint64(row) >> np.uint64(32))) ^ np.uint32(seed)))


@compiled()
def _moved_from(row: int, key: Any) -> Any:
    """The same, with what the row's upper bits and the seed amount to, which hardly ever changes."""
    return np.int64(mix(np.uint32(np.uint32(row) ^ key)) & np.uint32(127))


@compiled()
def add_row(like: Any, sums: int, values: int, signs: Any, moved: int, row: int) -> None:
    size = 8 * like.itemsize
    shift = np.uint32(8 * (row % 4))
    for g in range(128):
        slot = g ^ moved
        add_signed(like, sums + slot * size, values + g * size, np.uint32(signs[slot] >> shift))

"""The numbers that the definition derives from positions: the digest of a line of 1024 bytes, and the signs and slots
of groups.

A row of 1024 elements has 128 groups of 8. Constants of the definition are passed as tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from tensortap.kernels.jit import compiled
from tensortap.kernels.vectors import add_signed, pointer

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
    """Return the sum of 256 words times their weights, which come in pairs: both halves of 64 bits."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    total = np.uint64(0)
    for i in range(128):  # vectors multiply the lower halves of 64 bits, so nothing is unpacked
        total += (words[i] & low) * (weights[i] & low) + (words[i] >> half) * (weights[i] >> half)
    return total


@compiled()
def sign_key(row: int, seed: Any) -> Any:
    """Return numbers that give the signs of a row's groups: those of a slot are mix((low + slot) ^ key) >> shift."""
    first = np.uint64(row >> 2) * np.uint64(128)
    key = np.uint32(mix(np.uint32(first >> np.uint64(32))) ^ np.uint32(seed))
    return np.uint32(first), key, np.uint32(8 * (row & 3))


@compiled()
def signs_of_row(row: int, seed: Any, out: Any) -> None:
    """Compute the signs of the group of four rows that has this row: for each of them, a byte for each slot."""
    low, key, _ = sign_key(row, seed)
    for i in range(128):
        signs = mix(np.uint32(np.uint32(low + np.uint32(i)) ^ key))
        out[i] = np.uint8(signs)
        out[128 + i] = np.uint8(signs >> np.uint32(8))
        out[256 + i] = np.uint8(signs >> np.uint32(16))
        out[384 + i] = np.uint8(signs >> np.uint32(24))


@compiled()
def moved_by(row: int, seed: Any) -> Any:
    """Return the number that maps the row's groups to slots by XOR."""
    return _moved_from(row, np.uint32(mix(np.uint32(np.uint64(row) >> np.uint64(32))) ^ np.uint32(seed)))


@compiled()
def _moved_from(row: int, key: Any) -> Any:
    """The same, given the contribution of the row's upper bits and the seed, which hardly ever changes."""
    return np.int64(mix(np.uint32(np.uint32(row) ^ key)) & np.uint32(127))


@compiled()
def add_row(like: Any, sums: int, values: int, signs: int, moved: int) -> None:
    """Add a row to the sums of the sketch. `signs` is the address of the signs of each slot."""
    size = 8 * like.itemsize
    of_slot = carray(pointer(signs), 128, np.uint8)
    for g in range(128):
        slot = g ^ moved
        add_signed(like, sums + slot * size, values + g * size, of_slot[slot])

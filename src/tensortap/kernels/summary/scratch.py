"""The scratch memory of one thread: where each part of it begins."""

from __future__ import annotations

__all__ = ["FEW", "GROUPS", "NEXT", "ORDINARY", "RAW", "SCRATCH", "SIGNS", "SUMS", "VALUES"]

_APART = 8192 + 128
"""Bytes from one part to the next: 1024 numbers, and room around them: groups at the ends of a row are read whole."""
RAW, ORDINARY, FEW, NEXT, SUMS, SIGNS, GROUPS = (64 + i * _APART for i in range(7))
VALUES = GROUPS + 2 * _APART
SCRATCH = VALUES + 4 * _APART
"""Bytes that one thread needs, aligned to 64."""

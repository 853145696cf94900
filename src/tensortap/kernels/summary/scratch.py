"""The scratch memory of one thread: where each part of it begins."""

from __future__ import annotations

__all__ = ["FEW", "GROUPS", "ORDINARY", "RAW", "SCRATCH", "SIGNS", "SUMS", "VALUES"]

_APART = 8192 + 128
"""Bytes from one part to the next: 1024 numbers, and room around them: groups at the ends of a row are read whole."""
RAW, VALUES, ORDINARY, FEW, SUMS, SIGNS, GROUPS = (64 + i * _APART for i in range(7))
SCRATCH = GROUPS + 2 * _APART
"""Bytes that one thread needs, aligned to 64."""

"""The scratch memory of one thread: where each part of it begins."""

from __future__ import annotations

__all__ = ["FEW", "LISTS", "ORDINARY", "PIECE", "PIECE_VALUES", "RAW", "SCRATCH", "SIGNS", "SUMS", "VALUES"]

RAW, VALUES, ORDINARY, FEW, SUMS, SIGNS, PIECE, PIECE_VALUES, LISTS = (i * 8192 for i in range(9))
SCRATCH = 9 * 8192
"""Bytes that one thread needs, aligned to 64."""

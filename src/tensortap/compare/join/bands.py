"""The bytes of a whole tensor, a range of flat positions at a time, from the pieces that several ranks stored.

An assembly is plain data, like a span of a file, so that any engine can send it to any process. A range needs as much
memory as it has elements; the whole is never in memory. Every byte of a piece is read once if ranges are cut
along the leading dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.compare.join.geometry import Extent, blocks_of_range, overlap
from tensortap.core import dtypes
from tensortap.core.placement import Box
from tensortap.store.source import Bytes, Range

__all__ = ["Assembly", "Piece", "ranges", "read_range"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes that one rank stored of a whole."""

    name: str
    """The object that holds them, as `Bytes` names it."""
    offset: int
    shape: tuple[int, ...]
    """Shape of the local tensor; one dimension if the whole is flattened."""
    boxes: tuple[Box, ...]
    order: tuple[int, ...] = ()
    """The local dimension of each dimension of the whole; empty if they are in the same order."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A whole tensor: the sum of `summands`, each of which covers it once, times `weight`."""

    shape: tuple[int, ...]
    """Shape of the whole; one dimension if a piece is a range of flat positions."""
    summands: tuple[tuple[Piece, ...], ...]
    weight: float = 1.0


def read_range(files: Bytes, whole: Assembly, dtype: str, start: int, stop: int) -> npt.NDArray[Any]:
    """Return the elements `start` to `stop` of a whole in C order.

    A sum is added up in float64 and rounded once, as exact as a reduction in the dtype can be.
    """
    kind = dtypes.numpy_dtype(dtype)
    if len(whole.summands) == 1 and whole.weight == 1.0:
        return _gather(files, whole.shape, whole.summands[0], kind, start, stop)
    exact = np.complex128 if kind.kind == "c" else np.float64
    total = np.zeros(stop - start, exact)
    with np.errstate(all="ignore"):
        for pieces in whole.summands:
            total += _gather(files, whole.shape, pieces, kind, start, stop).astype(exact)
        return (total * whole.weight).astype(kind)


def _gather(
    files: Bytes, shape: tuple[int, ...], pieces: tuple[Piece, ...], dtype: np.dtype[Any], start: int, stop: int
) -> npt.NDArray[Any]:
    found = np.empty(stop - start, dtype)
    begin = 0
    for block in blocks_of_range(shape, start, stop):
        lengths = [length for _, length in block]
        target = found[begin : begin + prod(lengths)].reshape(lengths)
        begin += prod(lengths)
        for piece in pieces:
            for own, place in _parts(piece, block):
                target[place] = _read(files, piece, own, dtype)
    return found


def _parts(piece: Piece, block: Extent) -> Iterator[tuple[Extent, tuple[slice, ...]]]:
    """Yield what a piece has of a block: the extent in the local tensor, along the whole's dimensions, and the place in
    the block."""
    for box in piece.boxes:
        common = overlap(tuple((offset, length) for _, offset, length in box), block)
        if common is None:
            continue
        own = tuple(
            (start + first - offset, length) for (start, offset, _), (first, length) in zip(box, common, strict=True)
        )
        place = tuple(
            slice(first - offset, first - offset + length)
            for (offset, _), (first, length) in zip(block, common, strict=True)
        )
        yield own, place


def ranges(whole: Assembly, dtype: str, start: int, stop: int) -> Iterator[Range]:
    """Yield what `read_range` reads."""
    kind = dtypes.numpy_dtype(dtype)
    for pieces in whole.summands:
        for block in blocks_of_range(whole.shape, start, stop):
            for piece in pieces:
                for own, _ in _parts(piece, block):
                    yield _window(piece, own).range(piece, kind)


class _Window(NamedTuple):
    """The rows of a local tensor that hold a block of it."""

    skipped: int
    """Elements before them."""
    shape: tuple[int, ...]
    inside: tuple[slice, ...]
    """Where the block is in these rows."""

    def range(self, piece: Piece, dtype: np.dtype[Any]) -> Range:
        return Range(piece.name, piece.offset + self.skipped * dtype.itemsize, prod(self.shape) * dtype.itemsize)


def _read(files: Bytes, piece: Piece, own: Extent, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Read a block of a local tensor: the bytes between its first and last row, and no others."""
    window = _window(piece, own)
    data = files.view(*window.range(piece, dtype))
    array = np.frombuffer(data, np.uint8).view(dtype).reshape(window.shape)
    return array[window.inside].transpose(piece.order or tuple(range(len(own)))) if own else array


def _window(piece: Piece, own: Extent) -> _Window:
    if not own:
        return _Window(0, (), ())
    order = piece.order or tuple(range(len(own)))
    local: list[tuple[int, int]] = [(0, 0)] * len(own)
    for axis, span in zip(order, own, strict=True):
        local[axis] = span
    depth, skipped = 0, 0
    while depth < len(local) - 1 and local[depth][1] == 1:
        skipped += local[depth][0] * prod(piece.shape[depth + 1 :])
        depth += 1
    first, rows = local[depth]
    skipped += first * prod(piece.shape[depth + 1 :])
    inside = tuple(
        slice(None) if axis <= depth else slice(begin, begin + length) for axis, (begin, length) in enumerate(local)
    )
    return _Window(skipped, (*[1] * depth, rows, *piece.shape[depth + 1 :]), inside)

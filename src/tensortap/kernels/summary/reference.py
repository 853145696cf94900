"""The definition of a summary, in plain NumPy. Every fast kernel is tested against this file.

Digests must be equal bit for bit, moments and sketches within rounding. Any change of a result needs a new `VERSION`:
summaries of two versions cannot be compared.

**Elements.** A complex tensor is its real view, one trailing dimension of 2 longer, so that `elements`
counts components. A bool is a uint8 of 0 or 1. An element's place is its flat position `pos` in C order in
the whole tensor, whatever the strides in memory. The summary of a part takes the elements in the boxes of its
placement, with their positions in the whole; its counts and moments are those of these elements.

**Counts and moments.** elements, nan, posinf, neginf, zeros (-0.0 is one) and edge: the finite elements at the
edge of the dtype's range, |x| >= `dtypes.edge_of`, which masks are made of. Elements that are neither are ordinary.
Over the finite elements: min, max. Over the ordinary ones, in float64: mean, std = sqrt(M2 / n) with M2 = Σ(x - mean)²,
l1 = Σ|x|, l2 = sqrt(M2 + n·mean²). Where min == max and no element is at the edge, mean is that value and std is 0,
exactly. Where there is no element to take them over, min, max, mean and std are NaN and l1 and l2 are 0. Sums that
float64 cannot hold (elements past 1e150) are inf or NaN.

**Rows, groups and slots.** g = pos // 8 is an element's group, j = pos % 8 its place in it, and row = pos //
1024. In each row the groups are moved to slots: slot = (g % 128) ^ r, with r the low 7 bits of mix(row ^
ROW_SEED). mix is the 32-bit mixer "lowbias32"; of a number past 2³², the high word h takes part as mix(h):
mix(low ^ mix(h) ^ seed); mix(0) is 0.

**Digest.** The tensor's bytes, little endian, each group in its slot, padded with zeros to whole 32-bit
words W. Word k has line k // 256 and column k % 256, and the digest is Σ W · A[column] · H(line) mod 2⁶⁴. It
is linear in the bits, so parts merge by adding, exactly, even where they share a word. A holds 256 odd 32-bit
constants: the high halves of splitmix64's outputs from seed 0 with the first and last bit set, without those
whose last 11 bits came before; so two of them never differ by a multiple of 2¹¹. H is an odd 32-bit hash of
the line (the low half of splitmix64's finaliser).
  - Always detected: any change within one word, so any flipped bit; any swap of two unequal words of one
    line; two flipped top bits (float32 signs) in one line; any odd number of flipped top bits.
  - Missed with a chance of about 2⁻³¹: two lines that are swapped, or change by opposite amounts in the
    same columns; an even number of words that change in their top bit only (2⁻¹⁷ at worst, for two columns
    of the table in the same two lines); few words, all in one line or all in one column, that change by little.
    Other changes, which reach the words' last bits in several lines and columns, are missed with about 2⁻⁶³.
  - Never detected: zeros appended at the end. Shape and dtype are not part of it: compare them first.

**Sketch.** 256 buckets, added up in float64 and stored as float32. An element's sign is bit 8·(row % 4) + j of
mix((128·(row // 4) + slot) ^ SIGN_SEED) (set: minus), its bucket (2·slot + 29·j) % 256. An element that is infinite
or at the edge counts as 1 of its own sign, so that masks of any dtype have the sketch of their pattern; NaN adds
nothing. One hash gives the signs of four rows in a slot, eight neighbours stay neighbours, and one channel
reaches half of the buckets whatever the width of a row. A bucket past float32's range is inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes, statistics
from tensortap.core.placement import Placement
from tensortap.core.records import Summary
from tensortap.errors import UsageError

__all__ = [
    "BUCKETS",
    "ROW",
    "VERSION",
    "Piece",
    "added_values",
    "check_placement",
    "components",
    "digest_weights",
    "line_hash",
    "merge",
    "placed_components",
    "sketch_distance",
    "summarize",
]

VERSION = 3
BUCKETS = 256
ROW = 1024
"""Elements in a row; 1024 elements of n bytes fill n lines of the digest."""
SIGN_SEED = 0x27D4EB2F
ROW_SEED = 0x85EBCA6B
GOLDEN = 0x9E3779B97F4A7C15

_BLOCK = 1 << 20  # elements at a time, so that positions and hashes of a large tensor fit in memory

Words = npt.NDArray[np.uint64]


def summarize(array: npt.NDArray[Any], placement: Placement | None = None) -> Summary:
    """Return the summary of a tensor, or of one part of a larger one for `merge`.

    >>> s = summarize(np.array([3.0, -4.0], np.float32))
    >>> s.l1, s.l2, s.zeros
    (7.0, 5.0, 0)

    The lower half of a tensor of 4 rows:

    >>> summarize(np.ones((2, 3)), Placement.of_block((4, 3), (2, 0), (2, 3))).elements
    6
    """
    if placement is None:
        placement = Placement.of_whole(array.shape, {}, "")
    array, pieces = placed_components(array, placement)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        values = array.astype(np.float64).ravel()
    marked = np.isinf(values) | (np.isfinite(values) & (np.abs(values) >= dtypes.edge_of(dtypes.name_of(array.dtype))))
    ordinary = np.isfinite(values) & ~marked
    added = np.where(marked, np.sign(values), np.where(ordinary, values, 0.0))
    digest = 0
    sketch = np.zeros(BUCKETS)
    bits = array.view(f"<u{array.itemsize}")
    with np.errstate(over="ignore", invalid="ignore"):
        for span, pos in _positions(pieces):
            row, slot, j = _slots(pos)
            moved = np.uint64(ROW) * row + np.uint64(8) * slot + j
            digest += _digest(bits[span].astype(np.uint64), moved, array.itemsize)
            sketch += _sketch(added[span], row, slot, j)
        return Summary(
            elements=array.size,
            nan=int(np.isnan(values).sum()),
            posinf=int(np.isposinf(values).sum()),
            neginf=int(np.isneginf(values).sum()),
            zeros=int((values == 0).sum()),
            edge=int((marked & np.isfinite(values)).sum()),
            **_range(values[np.isfinite(values)]),
            **_moments(values[ordinary]),
            digest=digest % 2**64,
            more=added_values(array),
            sketch=sketch.astype(np.float32),
        )


def added_values(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Return the statistics that `core.statistics.register` has added, of an array of any dtype that is known.

    They take a pass of their own in NumPy, block by block, so that a large tensor needs little memory.
    """
    added = statistics.added()
    if not added:
        return {}
    flat = components(array).reshape(-1)
    found: dict[str, list[float]] = {each.name: [] for each in added}
    for start in range(0, flat.size, _BLOCK):
        with np.errstate(invalid="ignore"):
            block = flat[start : start + _BLOCK].astype(np.float64)
        for each in added:
            assert each.compute is not None
            found[each.name].append(each.compute(block))
    return {each.name: statistics.merge_values(each, found[each.name]) for each in added}


def merge(summaries: Iterable[Summary]) -> Summary:
    """Return the summary of the whole tensor from those of its parts, in any order. The parts must cover it once."""
    parts = list(summaries)
    values: dict[str, Any] = _pooled(parts)
    for each in statistics.stored():
        if each.name not in values:
            values[each.name] = statistics.merge_values(each, [part[each.name] for part in parts])
    with np.errstate(over="ignore", invalid="ignore"):
        sketch = sum((s.sketch for s in parts), start=np.zeros(BUCKETS)).astype(np.float32)
    return Summary(**statistics.fields_of(values), sketch=sketch)


def _pooled(parts: Sequence[Summary]) -> dict[str, float]:
    """Return mean and std of the whole, the statistics that merge by rule "pooled"."""
    n, mean, m2 = 0, 0.0, 0.0
    for s in parts:
        if s.ordinary:
            delta, total = s.mean - mean, n + s.ordinary
            m2 += s.std * s.std * s.ordinary + delta * delta * (n / total * s.ordinary)
            mean += delta * (s.ordinary / total)
            n = total
    low = min((s.min for s in parts if s.finite), default=math.nan)
    high = max((s.max for s in parts if s.finite), default=math.nan)
    if low == high and not any(s.edge for s in parts):
        mean, m2 = low, 0.0
    return {"mean": mean, "std": math.sqrt(m2 / n)} if n else {"mean": math.nan, "std": math.nan}


def sketch_distance(reference: Summary, candidate: Summary) -> float:
    """Estimate |reference - candidate| (L2) from the sketches alone; the estimate is unbiased in its square.

    Its standard error is about 4 % of the true distance, and 6 % if a single channel differs. NaN
    counts as 0. Return NaN if a bucket overflowed float32 on both sides.
    """
    with np.errstate(invalid="ignore"):
        difference = reference.sketch.astype(np.float64) - candidate.sketch
    return math.sqrt(float(difference @ difference))


def components(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array as real, little-endian numbers in C order; copy only if necessary.

    Raise UsageError if the dtype is not supported.
    """
    try:
        dtypes.name_of(array.dtype)
    except KeyError:
        raise UsageError(
            f"cannot summarise elements of dtype {array.dtype}; supported are {', '.join(dtypes.NAMES)}"
        ) from None
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # ascontiguousarray makes a 0-d array 1-d, which np.require does not.
    array = np.require(array, requirements=["C", "A"])
    if array.dtype.kind == "c":
        return array[..., np.newaxis].view(array.real.dtype)
    return array.view(np.uint8) if array.dtype.kind == "b" else array


def digest_weights() -> npt.NDArray[np.uint32]:
    """Return the table A: 256 odd constants, no two of which differ by a multiple of 2¹¹."""
    weights: dict[int, int] = {}
    state = 0
    while len(weights) < 256:
        state = (state + GOLDEN) % 2**64
        weight = int(_finalise(np.array([state], np.uint64))[0]) >> 32 | 0x80000001
        weights.setdefault(weight % 2**11, weight)
    return np.array(list(weights.values()), np.uint32)


class Piece(NamedTuple):
    """One box of a placement: its shape, the index of its first element in the whole, and the shape of the whole."""

    block: tuple[int, ...]
    offset: tuple[int, ...]
    whole: tuple[int, ...]


def placed_components(array: npt.NDArray[Any], placement: Placement) -> tuple[npt.NDArray[Any], list[Piece]]:
    """Return the components that the boxes hold, box after box in one dimension, and where each box sits."""
    check_placement(array.shape, placement)
    local = components(array)
    order, shape, more = placement.order, placement.shape, array.dtype.kind == "c"
    if placement.flat:
        local, shape, order = local.reshape(-1, 2) if more else local.reshape(-1), (math.prod(shape),), ()
    if order:
        local = local.transpose((*order, len(order)) if more else order)
    pieces = []
    taken = [np.empty(0, local.dtype)]
    for box in placement.boxes:
        spans = (*box, (0, 0, 2)) if more else box
        index: Any = (*(slice(start, start + n) for start, _, n in spans), ...)
        taken.append(local[index].reshape(-1))
        block, offset = tuple(n for _, _, n in spans), tuple(at for _, at, _ in spans)
        pieces.append(Piece(block, offset, (*shape, 2) if more else shape))
    return np.concatenate(taken), pieces


def check_placement(shape: tuple[int, ...], placement: Placement) -> None:
    """Raise UsageError if a local tensor of this shape does not have the boxes, or the whole does not."""
    sizes = (math.prod(placement.shape),) if placement.flat else placement.shape
    for box in placement.boxes:
        inside = len(box) == len(sizes) and all(
            start >= 0 and at >= 0 and at + n <= size for (start, at, n), size in zip(box, sizes, strict=True)
        )
        if not inside or not placement.fits(shape):
            raise UsageError(
                f"a block of shape {tuple(n for _, _, n in box)} at offset {tuple(at for _, at, _ in box)} of a tensor "
                f"of shape {shape} does not fit in the whole's {placement.shape}"
            )


def _positions(pieces: Iterable[Piece]) -> Iterator[tuple[slice, Words]]:
    """Yield spans of all elements, in the order of `placed_components`, with their flat positions in the whole."""
    first = 0
    for block, offsets, shape in pieces:
        size = math.prod(block)
        for start in range(0, size, _BLOCK):
            stop = min(start + _BLOCK, size)
            index = np.arange(start, stop, dtype=np.uint64)
            pos = np.zeros(stop - start, np.uint64)
            stride = 1
            for n, offset, whole in zip(reversed(block), reversed(offsets), reversed(shape), strict=True):
                index, along = np.divmod(index, np.uint64(n))
                pos += (along + np.uint64(offset)) * np.uint64(stride)
                stride *= whole
            yield slice(first + start, first + stop), pos
        first += size


def _range(finite: npt.NDArray[np.float64]) -> dict[str, float]:
    return (
        {"min": float(finite.min()), "max": float(finite.max())} if finite.size else {"min": math.nan, "max": math.nan}
    )


def _moments(ordinary: npt.NDArray[np.float64]) -> dict[str, float]:
    n = ordinary.size
    if not n:
        return {"mean": math.nan, "std": math.nan, "l1": 0.0, "l2": 0.0}
    mean, m2 = float(ordinary[0]), 0.0
    if ordinary.min() != ordinary.max():
        mean = float(ordinary.mean())
        m2 = float(np.square(ordinary - mean).sum())
    return {
        "mean": mean,
        "std": math.sqrt(m2 / n),
        "l1": float(np.abs(ordinary).sum()),
        "l2": float(np.sqrt(m2 + n * np.square(mean))),
    }


def _digest(bits: Words, pos: Words, itemsize: int) -> int:
    if itemsize == 8:
        low, high = bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)
        return _digest(low, pos * np.uint64(2), 4) + _digest(high, pos * np.uint64(2) + np.uint64(1), 4)
    byte = pos * np.uint64(itemsize)
    word = byte // np.uint64(4)
    in_word = bits << (np.uint64(8) * (byte % np.uint64(4)))
    weight = _WEIGHTS[word % np.uint64(256)] * line_hash(word // np.uint64(256))
    return int((in_word * weight).sum(dtype=np.uint64))


def line_hash(line: Words) -> Words:
    """Return H, the odd hash of a line of the digest."""
    odd: Words = _finalise(line + np.uint64(GOLDEN)) & np.uint64(0xFFFFFFFF) | np.uint64(1)
    return odd


def _finalise(z: Words) -> Words:
    """Apply the finaliser of splitmix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = z ^ (z >> np.uint64(31))
    return mixed


def _slots(pos: Words) -> tuple[Words, Words, Words]:
    """Return an element's row, the slot of its group, and its place in the group."""
    g, row = pos // np.uint64(8), pos // np.uint64(ROW)
    slot = (g % np.uint64(128)) ^ (_hash(row, ROW_SEED) & np.uint32(127)).astype(np.uint64)
    return row, slot, pos % np.uint64(8)


def _sketch(values: npt.NDArray[np.float64], row: Words, slot: Words, j: Words) -> npt.NDArray[np.float64]:
    four, within = np.divmod(row, np.uint64(4))
    bit = (np.uint64(8) * within + j).astype(np.uint32)
    minus = (_hash(np.uint64(128) * four + slot, SIGN_SEED) >> bit) & np.uint32(1)
    bucket = (np.uint64(2) * slot + np.uint64(29) * j) % np.uint64(BUCKETS)
    signed = np.where(minus == 1, -values, values)
    return np.bincount(bucket.astype(np.int64), signed, BUCKETS).astype(np.float64)


def _hash(x: Words, seed: int) -> npt.NDArray[np.uint32]:
    low, high = x.astype(np.uint32), (x >> np.uint64(32)).astype(np.uint32)
    return _mix(low ^ _mix(high) ^ np.uint32(seed))


def _mix(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    mixed: npt.NDArray[np.uint32] = x ^ (x >> np.uint32(16))
    return mixed


_WEIGHTS = digest_weights().astype(np.uint64)

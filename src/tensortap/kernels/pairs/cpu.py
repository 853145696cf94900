"""The difference of a pair, in one pass of compiled code over the bytes of both tensors, on several cores.

`pairs.reference` defines every number. Threads take chunks of fixed size from a shared counter. The chunks' records are
joined in order, so the result is the same bit for bit for any number of threads. `measure_range` measures a part of a
tensor, also in another process. `join` gives the same bits for any parts that begin at multiples of `CHUNK`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
from numba import types

from tensortap.core import dtypes
from tensortap.core.records import Difference
from tensortap.errors import UsageError
from tensortap.kernels.compiling import announced, load
from tensortap.kernels.pairs import rows as pair_rows
from tensortap.kernels.pairs import ulps
from tensortap.kernels.pairs.reference import (
    CHUNK,
    PairMeasure,
    SideMeasure,
    TensorRows,
    cosine,
    part_name,
    relative,
    tolerances,
)
from tensortap.kernels.sharing import MOST_THREADS, Helpers
from tensortap.kernels.summary import cpu

__all__ = [
    "CHUNK",
    "FIELDS",
    "PLACES",
    "PairFormat",
    "PairMeasure",
    "SideMeasure",
    "TensorRows",
    "difference",
    "join",
    "measure_range",
    "pair_format",
    "release",
    "tolerances",
]

FIELDS, PLACES = pair_rows.FIELDS, pair_rows.PLACES

_BLOCK = 16 * CHUNK  # elements that are copied at a time from a tensor that is not contiguous
_AT = types.int64

Array = npt.NDArray[Any]
Partial = npt.NDArray[np.float64]


class PairFormat(NamedTuple):
    """The form in which the kernel reads and judges elements of two dtypes."""

    like: Any
    """An array of the dtype that rows are converted to: float32 if it holds every element of both, else float64."""
    layouts: tuple[tuple[int, int, int, int], ...]
    unit: tuple[int, int, int]
    """The parameters of `ulps`: mode, mantissa bits, lowest exponent."""
    tolerances: tuple[float, float]
    same: int
    components: int
    """Components of an element: 2 if it is complex."""

    def allowed(self, rtol: float | None, atol: float | None) -> tuple[float, float]:
        """Return rtol and atol, with the defaults of the dtypes in place of None."""
        rtol, atol = self.tolerances[0] if rtol is None else rtol, self.tolerances[1] if atol is None else atol
        if not (rtol >= 0 and atol >= 0):
            raise UsageError(f"rtol and atol must be 0 or more, not {rtol} and {atol}")
        return float(rtol), float(atol)


_ONE_ROW = TensorRows(1 << 53, (), 0.0)
"""The default: the tensor is one row."""


class _PairScratch(threading.local):
    """Scratch memory of a thread, allocated once."""

    def __init__(self) -> None:
        self._memory = np.empty(pair_rows.SCRATCH + 64, np.uint8)
        self.address = (_address(self._memory) + 63) // 64 * 64


def difference(
    reference: Array,
    candidate: Array,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    size: float | None = None,
    threads: int | None = None,
) -> PairMeasure:
    """Measure how far `candidate` is from `reference`: tensors of one shape and any supported dtypes.

    `rtol` and `atol` decide which elements are mismatched; None means the `tolerances` of the two dtypes.
    `size` is the reference's l2, if it is known, as from its summary; None takes an extra pass.
    `threads`: None means one for each core, at most 8.

    >>> measure = difference(np.array([3.0, 4.0], np.float32), np.array([3.0, 4.5], np.float32))
    >>> measure.difference.rel_l2, measure.difference.max_abs_index
    (0.1, (1,))
    """
    if reference.shape != candidate.shape:
        raise UsageError(f"tensors of shapes {reference.shape} and {candidate.shape} cannot be compared")
    complex_parts = (2,) if reference.dtype.kind == "c" else ()
    rows = TensorRows.of(reference.shape, math.prod(complex_parts), _size(reference) if size is None else size)
    options: dict[str, Any] = {"rtol": rtol, "atol": atol, "rows": rows, "threads": threads}
    if reference.flags.c_contiguous and candidate.flags.c_contiguous:
        partials = [measure_range(reference.reshape(-1), candidate.reshape(-1), 0, **options)]
    else:
        partials = [
            measure_range(_flat(reference, start), _flat(candidate, start), start, **options)
            for start in range(0, reference.size, _BLOCK)
        ]
    return join(partials, (*reference.shape, *complex_parts), rows)


def measure_range(
    reference: Array,
    candidate: Array,
    start: int,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    rows: TensorRows = _ONE_ROW,
    threads: int | None = None,
) -> Partial:
    """Return the partial result of a range of two flat, contiguous tensors that begins at their element `start`.

    It is a matrix with one record for each chunk. `join` takes the matrices of all ranges, in any order.
    """
    pair = pair_format(reference.dtype, candidate.dtype)
    rtol, atol = pair.allowed(rtol, atol)
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be 1 or more, not {threads}")
    if reference.size != candidate.size:
        raise UsageError(f"ranges of {reference.size} and {candidate.size} elements cannot be compared")
    reference, candidate = _native(reference), _native(candidate)
    elements = reference.size * pair.components
    chunks = -(-elements // CHUNK)
    records = np.zeros((chunks, pair_rows.FIELDS))
    if not chunks:
        return records
    if pair.like.itemsize not in _ready:
        _compile(pair.like)
    counter = np.zeros(1, np.int64)
    fixed = (
        (_address(reference), _address(candidate)),
        elements,
        pair.like,
        pair.layouts,
        (rtol, atol, pair.same, start * pair.components, max(rows.length, 1), rows.floor2),
        pair.unit,
        _address(counter),
        _address(records),
    )

    def work() -> None:
        pair_rows.run(*fixed, _scratch.address)
        _ = reference, candidate, counter, records  # kept alive while a thread may read or write them

    _helpers.share(work, min(threads or MOST_THREADS, chunks) - 1)
    return records


def join(partials: Iterable[Partial], shape: tuple[int, ...] | None = None, rows: TensorRows = _ONE_ROW) -> PairMeasure:
    """Return the measure of a whole pair from those of its ranges, which cover it once and have the same `rows`.

    `shape` turns the position of the greatest difference into an index; that of a complex tensor ends with a 2.
    """
    every = list(partials)
    records = every[0] if len(every) == 1 else np.concatenate(every) if every else np.empty((0, pair_rows.FIELDS))
    if not len(records):
        return _conclude(np.zeros(pair_rows.FIELDS), shape, rows)
    records = records[np.argsort(records[:, 0], kind="stable")]
    if "finish" not in _ready:
        load(pair_rows.finish, (types.float64[:, ::1],))
        _ready.add("finish")
    pair_rows.finish(records)
    return _conclude(records[0], shape, rows)


def release() -> None:
    """End the helper threads. The next large pair starts new ones."""
    _helpers.release()


@cache
def pair_format(reference: np.dtype[Any], candidate: np.dtype[Any]) -> PairFormat:
    """Return the plan to compare two dtypes. Raise UsageError if they cannot be compared."""
    try:
        names = part_name(reference), part_name(candidate)
    except KeyError as unknown:
        raise UsageError(
            f"cannot compare elements of dtype {unknown.args[0]}; supported are {', '.join(dtypes.NAMES)}"
        ) from None
    if (reference.kind == "c") != (candidate.kind == "c"):
        raise UsageError(f"cannot compare elements of dtypes {reference} and {candidate}: only one is complex")
    r, c = (cpu.LAYOUTS[dtypes.numpy_dtype(dtypes.name_of(dtype))] for dtype in (reference, candidate))
    layouts = tuple((side.itemsize, side.code, side.table, int(side.like is cpu._WIDE)) for side in (r, c))
    like = r.like if r.like is c.like else cpu._WIDE
    return PairFormat(like, layouts, _unit(names), tolerances(*names), int(names[0] == names[1]), r.components)


def _unit(names: tuple[str, str]) -> tuple[int, int, int]:
    """Return the parameters with which `ulps` counts the steps between numbers of these dtypes."""
    floats = [name for name in names if dtypes.numpy_dtype(name).kind not in "iub"]
    if not floats:
        return ulps.INTEGERS, 0, 0
    coarser = max(floats, key=lambda name: float(ml_dtypes.finfo(dtypes.numpy_dtype(name)).eps))
    info = ml_dtypes.finfo(dtypes.numpy_dtype(coarser))
    if names[0] == names[1]:
        mode = ulps.BITS
    else:
        mode = ulps.WIDE_BITS if coarser == "float64" else ulps.ROUNDED
    return mode, int(info.nmant), int(info.minexp)


def _conclude(record: Partial, shape: tuple[int, ...] | None, rows: TensorRows) -> PairMeasure:
    _, elements, unlike, gap2, r2, c2, outside, ulp, *places = record[: pair_rows.SIDE[0]].tolist()
    top, place, r_value, c_value, wrong, *first_wrong = places
    if wrong:
        top = ulp = math.inf
        place, r_value, c_value = first_wrong
    index = None
    if top:
        index = (int(place),) if shape is None else tuple(int(i) for i in np.unravel_index(int(place), shape))
    row_error2, row = record[pair_rows.WORST : pair_rows.WORST + 2].tolist()
    l2, r_size, c_size = math.sqrt(gap2), math.sqrt(r2), math.sqrt(c2)
    found = Difference(
        elements=int(elements),
        equal=not unlike,
        exact=True,
        rel_l2=relative(l2, r_size),
        rel_l2_bar=0.0,
        cosine=cosine(l2, float(record[pair_rows.DOT]), r_size, c_size),
        l2=l2,
        max_abs=top,
        max_abs_index=index,
        reference_value=r_value if top else math.nan,
        candidate_value=c_value if top else math.nan,
        max_ulp=ulp,
        mismatched=(outside + wrong) / elements if elements else 0.0,
        row_rel_l2=math.sqrt(row_error2),
        row_index=rows.place(int(row)) if row_error2 else None,
    )
    return PairMeasure(found, *(_side(int(elements), record[at : at + 6].tolist()) for at in pair_rows.SIDE))


def _side(elements: int, numbers: list[float]) -> SideMeasure:
    n, mean, m2, nan, posinf, neginf = numbers
    mean, std = (mean, math.sqrt(m2 / n)) if n else (math.nan, math.nan)
    l2 = math.sqrt(m2 + n * (mean * mean)) if n else 0.0
    return SideMeasure(elements, int(nan), int(posinf), int(neginf), mean, std, l2)


def _size(reference: Array) -> float:
    """Return the reference's l2, as its summary has it."""
    return cpu.summarize(reference).l2


def _flat(array: Array, start: int) -> Array:
    if array.flags.c_contiguous:
        return array.reshape(-1)[start : start + _BLOCK]
    block: Array = array.flat[start : start + _BLOCK]
    return block


def _native(array: Array) -> Array:
    """Return the array as the compiled code reads it: contiguous and in native byte order."""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _compile(like: Array) -> None:
    layout = types.UniTuple(_AT, 4)
    with announced(pair_rows.run, f"pair kernel for {8 * like.itemsize}-bit numbers"):
        signature = (
            types.UniTuple(_AT, 2),
            _AT,
            types.float32[::1] if like is cpu._NARROW else types.float64[::1],
            types.UniTuple(layout, 2),
            types.Tuple((types.float64, types.float64, _AT, _AT, _AT, types.float64)),
            types.UniTuple(_AT, 3),
            _AT,
            _AT,
            _AT,
        )
        load(pair_rows.run, signature)
    _ready.add(like.itemsize)


_scratch = _PairScratch()
_helpers = Helpers("tensortap-pairs")
_ready: set[int | str] = set()

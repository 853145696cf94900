"""The definition of the difference of a pair, in plain NumPy. The compiled kernels are tested against this file.

**Elements.** Both tensors have one shape; their dtypes may differ. Elements are as in `summary.reference`: a complex
tensor is its real view, one trailing dimension of 2 longer; a bool is 0 or 1. All sums are in float64; squares that
float64 cannot hold (of elements past 1e150, or differences below 1e-160) make them inf, NaN or 0.

**Equal.** With one dtype, all bits are equal. With two, all values are equal as float64, and NaN equals NaN. 64-bit
integers are compared and subtracted as integers, also int64 with uint64.

**Non-finite elements.** If both elements are NaN, or both the same infinity, they agree: the distance is 0. If one is
not finite and the other is anything else, the element is mismatched, and max_abs and max_ulp are inf, found at the
first such position. None of these elements takes part in the sums below.

**Sums**, over the elements that are finite on both sides: l2 = |c - r|; rel_l2 = l2 / |r|, where 0 / 0 is 0 and
x / 0 is inf; cosine = 1 - (l2² - (|r| - |c|)²) / (2 |r| |c|), which keeps tiny distances, clipped to [-1, 1].
If one side is more than twice the other, that formula is less exact, and cosine = r·c / (|r| |c|).
Two tensors of zeros have a cosine of 1; if only one is zero, it is 0.

**Each side**, over its own elements: nan, posinf, neginf; over the finite ones: mean, std = sqrt(M2 / n) and l2,
as in `summary.reference`; if none is finite, mean and std are NaN and l2 is 0.

**max_abs** is the greatest |c - r|, with the index of the first element that has it and both values there. If no
value differs, there is no index, and the values are NaN.

**max_ulp** is the greatest number of steps from one element to the other through the numbers of the coarser dtype, the
one with the larger eps; -0 and 0 are one number. If the dtypes differ, both elements are first rounded to the coarser
one, to nearest even; its exponents then have no upper limit. Every float is coarser than every integer; between
integers it is max_abs.

**mismatched** is the share of elements with |c - r| > atol + rtol · |r|. `tolerances` has the defaults.

**Rows.** A row lies along the last dimension. Trailing dimensions of 1 do not count, a tensor of one dimension or none
is one row, and both parts of a complex element belong to its row. row_rel_l2 is the greatest
|c_row - r_row| / max(|r_row|, floor), with 0 / 0 and x / 0 as above, found at the first row that has it; row_index is
the index of that row: () if there is only one row, None if no value differs.
The floor is `ROW_FLOOR` times the root mean square of all rows' sizes, |r| / sqrt(rows), where |r| is the reference's
own l2. A row may be small because its terms cancel out, or because it is padding. It then carries the rounding errors
of terms as large as those of other rows: relative to itself, such a row would be wrong in every low precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import Difference
from tensortap.kernels.summary.reference import ROW, components

__all__ = [
    "CHUNK",
    "ROW_FLOOR",
    "PairMeasure",
    "SideMeasure",
    "TensorRows",
    "cosine",
    "measure",
    "part_name",
    "relative",
    "tolerances",
]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

CHUNK = 256 * ROW
"""Elements of one partial result. Fixed, so that results do not depend on how the work is shared."""
ROW_FLOOR = 1 / 8

_TOLERANCES = {
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    # Two units in the last place, as for bfloat16, and the smallest number above zero.
    "float8_e4m3fn": (2 * 2.0**-3, 2.0**-9),
    "float8_e5m2": (2 * 2.0**-2, 2.0**-16),
}


@dataclass(frozen=True, slots=True)
class SideMeasure:
    """The statistics of one of the two tensors, from the same pass."""

    elements: int
    nan: int
    posinf: int
    neginf: int
    mean: float
    std: float
    l2: float

    @property
    def inf(self) -> int:
        return self.posinf + self.neginf

    @property
    def var(self) -> float:
        return self.std * self.std


class TensorRows(NamedTuple):
    """The division of a tensor into rows. The elements of a complex tensor are its components."""

    length: int
    leading: tuple[int, ...]
    """The dimensions that number the rows."""
    floor: float
    """The size that smaller rows are measured with."""

    @classmethod
    def of(cls, shape: tuple[int, ...], components: int, size: float) -> TensorRows:
        """Return the rows of a reference with l2 `size`; `components` is 2 if its elements are complex.

        >>> TensorRows.of((4, 25, 1), 1, size=20.0)
        TensorRows(length=25, leading=(4,), floor=1.25)
        """
        while shape and shape[-1] == 1:
            shape = shape[:-1]
        leading = shape[:-1]
        return cls(
            math.prod(shape[-1:]) * components, leading, ROW_FLOOR * size / math.sqrt(max(math.prod(leading), 1))
        )

    @property
    def floor2(self) -> float:
        """Return the square of the floor; inf if float64 cannot hold it."""
        return self.floor * self.floor

    def place(self, number: int) -> tuple[int, ...]:
        """Return the index of the row with this number."""
        return tuple(int(i) for i in np.unravel_index(number, self.leading)) if self.leading else ()


@dataclass(frozen=True, slots=True)
class PairMeasure:
    """The difference of a pair, and the statistics of both sides from the same pass."""

    difference: Difference
    reference: SideMeasure
    candidate: SideMeasure


def tolerances(reference: str, candidate: str) -> tuple[float, float]:
    """Return rtol and atol for two dtypes: the looser of the defaults of torch.testing.assert_close.

    >>> tolerances("float32", "bfloat16")
    (0.016, 1e-05)
    """
    pair = [_TOLERANCES.get(part_name(dtypes.numpy_dtype(name)), (0.0, 0.0)) for name in (reference, candidate)]
    return max(rtol for rtol, _ in pair), max(atol for _, atol in pair)


def part_name(dtype: np.dtype[Any]) -> str:
    """Return the dtype's name; for a complex dtype, that of its real part."""
    return {"complex64": "float32", "complex128": "float64"}.get(name := dtypes.name_of(dtype), name)


def relative(l2: float, size: float) -> float:
    """Return the distance relative to the reference's size."""
    if size == 0:
        return math.inf if l2 else 0.0
    return l2 / size


def cosine(l2: float, dot: float, r: float, c: float) -> float:
    """Return the cosine of two tensors from their distance, their scalar product and their sizes."""
    if r == 0 or c == 0:
        return 1.0 if r == c else 0.0
    if r <= 2 * c and c <= 2 * r:
        found = 1 - (l2 / r * (l2 / c) - (r - c) / r * ((r - c) / c)) / 2
    else:
        found = dot / r / c
    return min(max(found, -1.0), 1.0)


def measure(reference: Array, candidate: Array, *, rtol: float | None = None, atol: float | None = None) -> PairMeasure:
    """Measure a pair by the definition, slowly and with several copies in memory.

    >>> measure(np.zeros(2), np.array([0.0, 2.0])).difference.max_abs_index
    (1,)
    """
    names = part_name(reference.dtype), part_name(candidate.dtype)
    default = tolerances(*names)
    shape, parts = reference.shape, 2 if reference.dtype.kind == "c" else 1
    reference, candidate = components(reference), components(candidate)
    with np.errstate(all="ignore"):
        r, c = reference.astype(np.float64), candidate.astype(np.float64)
        both = np.isfinite(r) & np.isfinite(c)
        wrong = ~both & (r != c) & ~(np.isnan(r) & np.isnan(c))
        gaps = np.where(both, _gaps(reference, candidate), np.where(wrong, np.inf, 0.0))
        allowed = (default[1] if atol is None else atol) + (default[0] if rtol is None else rtol) * np.abs(r)
        outside = wrong | (both & (gaps > allowed))
        sizes = [float(np.sqrt(np.square(side[both]).sum())) for side in (r, c)]
        l2, dot = float(np.sqrt(np.square(gaps[both]).sum())), float((r[both] * c[both]).sum())
    if names[0] == names[1]:
        equal = reference.tobytes() == candidate.tobytes()
    else:
        equal = not gaps.any()
    top = float(gaps.max(initial=0.0))
    index = np.unravel_index(int(gaps.argmax()), gaps.shape) if top else None
    own = _side(r)
    rows = TensorRows.of(shape, parts, own.l2)
    row_error, row_index = _worst_row(np.where(both, r, 0), np.where(both, gaps, 0), rows)
    difference = Difference(
        elements=gaps.size,
        equal=equal,
        exact=True,
        rel_l2=relative(l2, sizes[0]),
        rel_l2_bar=0.0,
        cosine=cosine(l2, dot, *sizes),
        l2=l2,
        max_abs=top,
        max_abs_index=None if index is None else tuple(int(i) for i in index),
        reference_value=math.nan if index is None else float(r[index]),
        candidate_value=math.nan if index is None else float(c[index]),
        max_ulp=math.inf if wrong.any() else _most_steps(reference[both], candidate[both], names),
        mismatched=float(outside.mean()) if outside.size else 0.0,
        row_rel_l2=row_error,
        row_index=row_index,
    )
    return PairMeasure(difference, own, _side(c))


def _worst_row(values: Floats, gaps: Floats, rows: TensorRows) -> tuple[float, tuple[int, ...] | None]:
    if not gaps.any():
        return 0.0, None
    with np.errstate(all="ignore"):
        sizes, off = (np.sqrt(np.square(each.reshape(-1, rows.length)).sum(axis=1)) for each in (values, gaps))
        errors = np.where(off > 0, off / np.maximum(sizes, rows.floor), 0.0)
    worst = int(errors.argmax())
    return float(errors[worst]), rows.place(worst) if errors[worst] else None


def _gaps(reference: Array, candidate: Array) -> Floats:
    if all(side.dtype.kind in "iu" and side.itemsize == 8 for side in (reference, candidate)):
        exact = np.abs(candidate.astype(object) - reference.astype(object))
        return np.asarray(exact, np.float64).reshape(reference.shape)
    gaps: Floats = np.abs(candidate.astype(np.float64) - reference.astype(np.float64))
    return gaps


def _side(values: Floats) -> SideMeasure:
    finite = values[np.isfinite(values)]
    constant = finite.size and finite.min() == finite.max()
    mean = float(finite[0] if constant else finite.mean()) if finite.size else math.nan
    with np.errstate(over="ignore", under="ignore"):
        m2 = float(np.square(finite - mean).sum()) if finite.size else math.nan
        l2 = float(np.sqrt(np.square(finite).sum()))
    return SideMeasure(
        elements=values.size,
        nan=int(np.isnan(values).sum()),
        posinf=int(np.isposinf(values).sum()),
        neginf=int(np.isneginf(values).sum()),
        mean=mean,
        std=math.sqrt(m2 / finite.size) if finite.size else math.nan,
        l2=l2,
    )


def _most_steps(reference: Array, candidate: Array, names: tuple[str, str]) -> float:
    floats = [name for name in names if dtypes.numpy_dtype(name).kind not in "iub"]
    if not floats:
        return float(_gaps(reference, candidate).max(initial=0.0))
    coarser = max(floats, key=lambda name: float(ml_dtypes.finfo(dtypes.numpy_dtype(name)).eps))
    places = [_ordinals(side.astype(np.float64), coarser) for side in (reference, candidate)]
    return float(np.abs(places[1] - places[0]).max(initial=0))


def _ordinals(values: Floats, name: str) -> Array:
    """Return the rank of each value, rounded to the type, among the type's numbers, as Python integers: 0 for zero."""
    info = ml_dtypes.finfo(dtypes.numpy_dtype(name))
    digits, lowest = int(info.nmant), int(info.minexp)
    exponent = np.maximum(np.frexp(values)[1] - 1, lowest)
    number = np.rint(np.ldexp(values, digits - exponent)).astype(np.int64).astype(object)
    places: Array = number + np.sign(values).astype(int) * (exponent - lowest).astype(object) * 2**digits
    return places

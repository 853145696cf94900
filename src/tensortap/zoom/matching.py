"""Finds the values that two traces have in common, regardless of the operators that made them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensortap.core.operators import OperatorTrace, TracedValue

__all__ = ["EXACT", "Matches", "Values", "epsilon_of", "match_values"]

EXACT = 1e-9
"""Relative difference that float64 leaves between two ways to compute the same."""
_EPSILONS = 16
_SAMPLES = 64
_ABSOLUTE = 1e-30
_LOOSE = 1e-5
"""Relative difference of samples up to which all elements are compared."""
_MEDIAN_OF = 4096
_PART = 1 << 15
_HUGE = 1e4
"""Elements that exceed the median by this factor belong to a mask."""
_SUMS = ("sum", "mean", "native_layer_norm_backward", "mm", "bmm", "addmm", "embedding_dense_backward")
"""Names of operators whose results may cancel to zero."""


@cache
def epsilon_of(dtype: str) -> float:
    """Return the spacing of a floating-point dtype at 1; 0 for other dtypes."""
    try:
        return float(ml_dtypes.finfo(dtype).eps)
    except (ValueError, TypeError):
        return 0.0


@dataclass(frozen=True)
class _Print:
    """A few elements of a value; cheap to compare."""

    samples: npt.NDArray[np.float64]
    """Infinite and NaN are 0."""
    place: tuple[Any, ...]
    """Two values with the same place are the same elements in the same order."""
    memory: tuple[Any, ...]
    """The same for the order of elements in memory; empty if there are gaps between them."""
    strides: tuple[Any, ...]


class Values:
    """The values of one trace as flat float64 arrays."""

    def __init__(self, trace: OperatorTrace, host: Callable[[Any], npt.NDArray[Any]]) -> None:
        self.trace = trace
        self._host = host
        self._prints: dict[int, _Print] = {}
        self._norms: dict[int, float] = {}
        self._distances: dict[tuple[Any, ...], float] = {}

    def forget(self) -> None:
        """Forget the values known by address, after an operator has written in place."""
        self._prints.clear()
        self._distances.clear()

    def _flat(self, number: int, in_memory_order: bool) -> npt.NDArray[Any]:
        found = self._host(self.trace.values[number].tensor)
        return found.ravel("K") if in_memory_order else found.reshape(-1)  # the latter copies what is transposed

    def print_of(self, number: int) -> _Print:
        if number not in self._prints:
            values = self._host(self.trace.values[number].tensor)
            places = np.linspace(0, max(values.size - 1, 0), min(values.size, _SAMPLES)).astype(np.int64)
            picked = values[np.unravel_index(places, values.shape)] if values.ndim else values.reshape(-1)
            samples = picked.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
            memory = (values.ctypes.data, values.size, str(values.dtype))
            strides = () if values.flags.c_contiguous else (values.shape, values.strides)
            dense = not strides or values.transpose(np.argsort(values.strides)[::-1]).flags.c_contiguous
            signed = np.abs(samples) * np.sign(samples.real)
            self._prints[number] = _Print(
                np.nan_to_num(signed, nan=0.0, posinf=0.0, neginf=0.0),
                (*memory, *strides),
                memory if dense else (),
                strides,
            )
        return self._prints[number]

    def norm(self, number: int) -> float:
        """Return the L2 norm of the finite elements."""
        if number not in self._norms:
            values = _real(self._flat(number, in_memory_order=True))
            norm = float(np.sqrt(sum(float(np.dot(part, part)) for part in _parts(values))))
            if not np.isfinite(norm):
                values = values.astype(np.float64)
                norm = float(np.linalg.norm(values[np.isfinite(values)]))
            self._norms[number] = norm
        return self._norms[number]

    def distance(self, number: int, other: Values, others: int) -> float:
        """Return the relative L2 distance of two values with the same number of elements; inf if it is unknown."""
        one, two = self.print_of(number), other.print_of(others)
        # A transposed weight is read in many places: its elements are compared once, as they are in memory.
        alike = bool(one.memory and two.memory and one.strides == two.strides)
        pair = (one.memory, two.memory) if alike else (one.place, two.place)
        if pair not in self._distances:
            self._distances[pair] = self._measure(number, other, others, alike)
        return self._distances[pair]

    def _measure(self, number: int, other: Values, others: int, in_memory_order: bool) -> float:
        ours = self._flat(number, in_memory_order)
        theirs = other._flat(others, in_memory_order)
        if ours.size != theirs.size:
            return float("inf")
        if ours.dtype == theirs.dtype and np.array_equal(_bits(ours), _bits(theirs)):
            return 0.0
        ours, theirs = _real(ours), _real(theirs)
        if ours.size != theirs.size:  # one of them is complex
            return float("inf")
        if ours.dtype.kind in "iub" and theirs.dtype.kind in "iub":
            return 0.0 if np.array_equal(ours, theirs) else float("inf")
        if (quick := _ordinary_distance(ours, theirs)) is not None:
            return quick
        with np.errstate(invalid="ignore"):  # memory that nothing has written to may hold signalling NaNs
            ours, theirs = ours.astype(np.float64, copy=False), theirs.astype(np.float64, copy=False)
        odd = ~np.isfinite(ours)
        if odd.any() or not np.isfinite(theirs).all():
            if not np.array_equal(ours[odd], theirs[odd], equal_nan=True) or (~np.isfinite(theirs) & ~odd).any():
                return float("inf")
            ours, theirs = ours[~odd], theirs[~odd]
        return _relative(ours, theirs)

    def floor(self, number: int) -> float:
        """Return the size of the terms that a value sums up; a value far below it is rounding.

        A gradient that is zero in theory, like that of a bias before a norm, has no size of its own.
        """
        operator = self.trace.producer(number)
        while operator is not None and operator.moves and operator.inputs:
            number = operator.inputs[0]
            operator = self.trace.producer(number)
        if operator is None or not operator.name.startswith(_SUMS):
            return 0.0
        return max((self.norm(each) for each in operator.inputs), default=0.0)

    def floored_distance(self, number: int, other: Values, others: int) -> float:
        """Return the distance relative to the value, or to the terms that it sums up if these are larger."""
        distance = self.distance(number, other, others)
        if not distance or not np.isfinite(distance):
            return distance
        size = other.norm(others)
        return distance * size / max(size, self.floor(number), other.floor(others))

    def equal(self, number: int, other: Values, others: int) -> bool:
        """Return whether two values have the same dtype and bits."""
        ours, theirs = self.trace.values[number], other.trace.values[others]
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return False
        one, two = self._host(ours.tensor), other._host(theirs.tensor)
        return (
            bool(np.array_equal(one.view(f"u{one.itemsize}"), two.view(f"u{two.itemsize}")))
            if one.ndim
            else bool(one.tobytes() == two.tobytes())
        )


@dataclass
class Matches:
    """The values of the candidate that are values of the reference, within the tolerance, and vice versa."""

    candidate: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    reference: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def add(self, candidate: int, reference: int) -> None:
        self.candidate[candidate].add(reference)
        self.reference[reference].add(candidate)


def tolerance(one: TracedValue, other: TracedValue, exact: bool) -> float:
    """Return the allowed relative distance of two values."""
    return EXACT if exact else _EPSILONS * max(epsilon_of(one.dtype), epsilon_of(other.dtype))


def match_values(
    candidate: Values,
    reference: Values,
    exact: bool,
    matches: Matches | None = None,
    of_candidate: Iterable[int] | None = None,
    of_reference: Iterable[int] | None = None,
) -> Matches:
    """Compare values that could be the same. Shapes may differ if the elements are the same, in the same order.

    matches, of_candidate, of_reference: extend earlier matches by these values only.
    """
    found = Matches() if matches is None else matches
    ours = range(len(candidate.trace.values)) if of_candidate is None else of_candidate
    theirs = range(len(reference.trace.values)) if of_reference is None else of_reference
    by_size: dict[int, list[int]] = defaultdict(list)
    for number in theirs:
        if reference.trace.values[number].uninitialised:
            continue
        by_size[int(np.prod(reference.trace.values[number].shape, dtype=np.int64))].append(number)
    for number in ours:
        value = candidate.trace.values[number]
        if value.uninitialised:
            continue
        for other in by_size.get(int(np.prod(value.shape, dtype=np.int64)), ()):
            counterpart = reference.trace.values[other]
            if (value.dtype == "bool") != (counterpart.dtype == "bool"):
                continue
            allowed = tolerance(value, counterpart, exact)
            if _alike(candidate.print_of(number), reference.print_of(other), allowed) and (
                candidate.floored_distance(number, reference, other) <= allowed
            ):
                found.add(number, other)
    return found


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values).view(np.uint64 if values.nbytes % 8 == 0 else np.uint8)


def _real(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values).view(values.real.dtype) if values.dtype.kind == "c" else values


def _parts(values: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the elements in float64, as many at a time as a cache holds."""
    for start in range(0, values.size, _PART):
        yield values[start : start + _PART].astype(np.float64, copy=False)


def _ordinary_distance(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> float | None:
    """Return the relative distance in one pass; None if some elements are not finite, or dwarf all others."""
    apart = size = largest = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for one, two in zip(_parts(ours), _parts(theirs), strict=True):
            difference = one - two
            apart += float(np.dot(difference, difference))
            size += float(np.dot(two, two))
            largest = max(largest, float(two.max()), -float(two.min()))
    if not np.isfinite(apart) or not np.isfinite(size) or largest > _limit(theirs):
        return None
    return _ratio(np.sqrt(apart), np.sqrt(size))


def _limit(theirs: npt.NDArray[Any]) -> float:
    """Return the size above which elements belong to a mask."""
    # The median of a sample, because that of all elements would take longer than the rest.
    sampled = np.abs(theirs[:: max(1, theirs.size // _MEDIAN_OF)]).astype(np.float64)
    ordinary = sampled[sampled > 0]
    return _HUGE * float(np.median(ordinary)) if ordinary.size else np.inf


def _relative(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> float:
    """Return the relative distance, with the elements of a mask, which dwarf all others, apart from the rest."""
    limit = _limit(theirs)
    if theirs.size and max(float(theirs.max()), -float(theirs.min())) > limit:
        huge = np.abs(theirs) > limit
        rest = _relative_l2(ours[~huge], theirs[~huge])
        return max(rest, _relative_l2(ours[huge], theirs[huge]))
    return _relative_l2(ours, theirs)


def _relative_l2(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> float:
    return _ratio(float(np.linalg.norm(ours - theirs)), float(np.linalg.norm(theirs)))


def _ratio(apart: float, size: float) -> float:
    return float(apart / size) if size else (0.0 if apart <= _ABSOLUTE else float("inf"))


def _alike(one: _Print, other: _Print, allowed: float) -> bool:
    """Return whether two values may be the same; a single element may be off by the whole allowance."""
    if one.samples.size != other.samples.size:
        return False
    size = max(np.abs(one.samples).max(initial=0.0), np.abs(other.samples).max(initial=0.0))
    # The elements between the samples may be larger, and a value that sums to zero has no size of its own.
    return bool((np.abs(one.samples - other.samples) <= max(1e3 * allowed, _LOOSE) * size + _ABSOLUTE).all())

"""Parts of a tensor as the CPU kernel reads them: their runs, and for short runs a plan that is made once.

A plan holds what `plans` computes of positions. A training repeats its placements at every step, and for short runs the
plan takes longer than the summary itself. It is made when a placement comes a second time, within a limit of memory.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from tensortap.core.placement import Placement
from tensortap.kernels.compiling import announced, load
from tensortap.kernels.summary import rows
from tensortap.kernels.summary.elements import ROW
from tensortap.kernels.summary.plans import PLAN_LISTS, PLAN_ROOM
from tensortap.kernels.summary.runs import PlacedRuns, is_entire, placed_array, runs_of

__all__ = ["Description", "Part", "placed"]

_SHORT = 4096
"""Mean elements of a run below which a plan is kept. Longer runs take little time to plan again."""
_MOST_BYTES = 64 << 20
"""Memory of all plans that are kept; the oldest ones make room."""
_MOST_KNOWN = 512

Array = npt.NDArray[Any]


class Description(NamedTuple):
    """The PLACED numbers of a part, and the memory that they refer to: it must live as long as the kernel runs."""

    numbers: npt.NDArray[np.int64]
    address: int
    """Address of the numbers; 0 if the part has the same positions as in the whole."""
    memory: tuple[Array, ...]


class Part:
    """A placement for elements of one size. Several threads may use it at once."""

    def __init__(self, runs: PlacedRuns, itemsize: int, constants: int) -> None:
        self._itemsize = itemsize
        self._constants = constants
        self._elements = int(runs.table[-1, 0])
        numbers = np.zeros(rows.PLACED, np.int64)
        numbers[rows.RUNS], numbers[rows.RUNS_COUNT] = _address(runs.table), len(runs.table)
        numbers[rows.CUT] = bool((runs.table % 8).any())
        self._unplanned = Description(numbers, _address(numbers) if runs.moves else 0, (runs.table,))
        self._current = self._unplanned
        is_short = self._elements < _SHORT * (len(runs.table) - 1)
        self._waits = runs.moves and is_short and 2 * self._most_bytes() < _MOST_BYTES
        self._was_used = False

    def describe(self) -> Description:
        """Return the numbers for a summary. From the second time on, they have a plan if runs are short."""
        if not self._waits:
            return self._current
        if self._was_used:
            self._keep_plan()
        self._was_used = True
        return self._current

    def _most_bytes(self) -> int:
        numbers = self._unplanned.numbers
        return _most_entries(self._elements, int(numbers[rows.RUNS_COUNT])) * sum(PLAN_LISTS)

    def _keep_plan(self) -> None:
        if not _lock.acquire(blocking=False):  # another thread makes one, or made one when this process was forked
            return
        try:
            if self._waits:
                self._current = _planned(self._unplanned, self._elements, self._itemsize, self._constants)
                self._waits = False
                _kept.append(self)
                while sum(each._plan_bytes() for each in _kept) > _MOST_BYTES:
                    _kept.popleft()._drop_plan()
        finally:
            _lock.release()

    def _drop_plan(self) -> None:
        self._current, self._waits, self._was_used = self._unplanned, True, False

    def _plan_bytes(self) -> int:
        return sum(each.nbytes for each in self._current.memory)


class _Known(NamedTuple):
    placement: Placement
    """The placement stays alive, so that no other one has its identity."""
    part: Part
    is_entire: bool


def placed(array: Array, placement: Placement, constants: int) -> tuple[Array, Part]:
    """Return the elements in the boxes, box after box, in C order, and their part. `constants`: see `rows.run`.

    A training repeats placements: they are found by identity, as their hash takes a microsecond.
    """
    key = id(placement), array.shape, array.dtype
    known = _known.get(key)
    if known is None:
        components = 2 if array.dtype.kind == "c" else 1
        part = _part_of(placement, components, array.dtype.itemsize // components, constants)
        known = _Known(placement, part, is_entire(array.shape, placement))
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = known
    return array if known.is_entire else placed_array(array, placement), known.part


@lru_cache(maxsize=512)
def _part_of(placement: Placement, components: int, itemsize: int, constants: int) -> Part:
    return Part(runs_of(placement, components), itemsize, constants)


def _most_entries(elements: int, runs: int) -> int:
    """Return the most groups of a part: a run begins and ends within one, and so does each row that cuts a run."""
    return min(elements, elements // 8 + 2 * (runs + 2 * (elements // ROW + 1)))


def _planned(described: Description, elements: int, itemsize: int, constants: int) -> Description:
    """Return the numbers with a plan of all rows."""
    _compile()
    numbers = described.numbers.copy()
    most = _most_entries(elements, int(numbers[rows.RUNS_COUNT]))
    sizes = PLAN_LISTS if numbers[rows.CUT] else PLAN_LISTS[:3]  # groups are whole: no masks, no places
    lists = [np.empty(most * size, np.uint8) for size in sizes]
    firsts, room = np.empty(-(-elements // ROW) + 1, np.int64), np.empty(PLAN_ROOM, np.uint8)
    numbers[rows.LISTS : rows.LISTS + len(sizes)] = [_address(each) for each in lists]
    rows.plan_part(elements, itemsize, _address(numbers), firsts, _address(room), constants)
    lists = [each[: size * firsts[-1]].copy() for each, size in zip(lists, sizes, strict=True)]
    numbers[rows.FIRSTS] = _address(firsts)
    numbers[rows.LISTS : rows.LISTS + len(sizes)] = [_address(each) for each in lists]
    return Description(numbers, _address(numbers), (*described.memory, firsts, *lists))


@lru_cache(maxsize=1)
def _compile() -> None:
    with announced(rows.plan_part, "CPU kernel for shards"):
        at = types.int64
        load(rows.plan_part, (at, at, at, types.int64[::1], at, at))


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


_lock = threading.Lock()
_kept: deque[Part] = deque()
_known: dict[tuple[int, tuple[int, ...], np.dtype[Any]], _Known] = {}

"""Holds every tensor of a running model against its record in the reference, and keeps the numbers, not the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.capture.clock import ModuleCall
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.selection import Keep
from tensortap.capture.tree import Site
from tensortap.capture.unique_keys import UniqueKeys
from tensortap.compare.measure.range_ends import beside_range_ends
from tensortap.core import dtypes
from tensortap.core.records import Key, Record
from tensortap.frameworks.base import Framework
from tensortap.isolate.reference import Counterpart, Reference
from tensortap.kernels import summarize
from tensortap.kernels.pairs.cpu import PairMeasure, difference
from tensortap.store.formats.live import LiveRun

__all__ = ["Comparator"]

_NO_SKETCH = np.empty(0, np.float32)


class Comparator:
    """The sink of a check: what comes in is measured at once and forgotten."""

    def __init__(
        self, framework: Framework, model: str, reference: Reference, tolerances: tuple[float | None, float | None]
    ) -> None:
        self.where = f"a check against {reference.run.path}"
        self.measured: dict[int, PairMeasure] = {}
        """By row: how far it is from the reference, where that took a look at all elements."""
        self.forced: set[int] = set()
        """Rows whose tensor was replaced by the reference's, once it had been looked at."""
        self.used_inside: set[int] = set()
        """Rows of wrong gradients at an output that the module itself uses further."""
        self.same: list[list[int]] = []
        """Rows of one gradient at an output that several calls return as it is, the innermost first."""
        self.cut_off: set[Key] = set()
        """Inputs that take no part in autograd, and outputs that should; in the reference's names."""
        self.callers: dict[tuple[int, int, str, int], str | None] = {}
        """By step, micro step, module and call: the module whose code made the call. In the reference's names."""
        self._framework = framework
        self._reference = reference
        self._tolerances = tolerances
        self._keys = UniqueKeys()
        about: dict[str, Any] = {"framework": framework.name, "model": model, "world": framework.world()}
        about["environment"] = framework.environment()
        self.run = LiveRun(f"{model}, as it runs", about, reference.rank)
        self._rows: dict[Key, int] = {}

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        self.look(tensor, key, site)

    def look(self, tensor: Any, key: Key, site: Site) -> tuple[Key, Counterpart | None]:
        """Measure a tensor. Returns the key it got, which may be a repeated one's, and what stands against it."""
        key = Key(*self._keys.unique(key))
        array = self._framework.host(tensor)
        summary = summarize(array)
        dtype = dtypes.name_of(array.dtype)
        found = self._reference.get(key)
        row = len(self.run)
        if found is not None and found.location is not None and found.shape == array.shape:
            if summary.digest != found.digest or dtype != found.dtype:
                self._measure(row, found, array, (summary.min, summary.max))
            summary = replace(summary, sketch=_NO_SKETCH)  # only needed where the bytes are not
        self._rows[key] = row
        self.run.append(Record(key, self._reference.rank, row, site.cls, dtype, array.shape, row, summary))
        return key, found

    def called(self, call: ModuleCall, step: int, caller: str | None) -> None:
        """A module is being called by another one's code, or from outside the model."""
        rename = self._reference.rename
        spot = step, call.micro, rename(call.module), call.number
        self.callers[spot] = None if caller is None else rename(caller)

    def note_inner_use(self, key: Key, from_outside: Any | None, gradient: Any) -> None:
        """Whether a wrong gradient at an output is not only what came from outside: the module uses the output too.
        `gradient` is all that comes to it there, but for what modules inside add."""
        if (row := self._rows[key]) not in self.measured:
            return
        if from_outside is not None:
            parts = (self._framework.host(each) for each in (from_outside, gradient))
            if difference(*parts).difference.equal:
                return
        self.used_inside.add(row)

    def note_same(self, keys: Sequence[Key]) -> None:
        """The same gradient was held against several records."""
        if len(keys) > 1:
            self.same.append([self._rows[key] for key in keys])

    def note_cut_off(self, key: Key) -> None:
        """An input takes no part in autograd, or an output though it should."""
        self.cut_off.add(key._replace(module=self._reference.rename(key.module)))

    def mark_forced(self, key: Key) -> None:
        """From here on, the reference's values are in this tensor's place."""
        if (row := self._rows.get(key)) is not None:
            self.forced.add(row)

    def end_step(self, step: int, book: CoverageBook) -> None:
        self._keys.clear()
        self._rows.clear()

    def close(self, status: str, reason: str, book: CoverageBook) -> None:
        self.run.close_with(status, reason, book.notices)

    def _measure(self, row: int, found: Counterpart, array: npt.NDArray[Any], ends: tuple[float, float]) -> None:
        rtol, atol = self._tolerances
        if ("complex" in found.dtype) != (array.dtype.kind == "c"):
            return
        values = self._reference.values(found)
        measure = difference(values, array, rtol=rtol, atol=atol, size=found.l2)
        dtype = dtypes.name_of(array.dtype)
        if dtype != found.dtype and set(ends) & set(dtypes.range_of(dtype) or ()):
            off = beside_range_ends(measure.difference, values, array, rtol, atol)
            measure = replace(measure, difference=off)
        self.measured[row] = measure

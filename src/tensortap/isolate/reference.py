"""The reference of a check: finds the record of a model's tensor, and its values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tensortap.compare.judge.causes import is_within
from tensortap.compare.judge.rules.rounding import EPSILON
from tensortap.core.records import MODULE_KINDS, Key, Location, Record, display_name
from tensortap.errors import UsageError
from tensortap.store import Run

__all__ = ["Counterpart", "ReferenceRecords"]

_COLUMNS = ("seq", "cls", "dtype", "shape", "tensor", "digest", "l2", "file", "offset", "nbytes")
_LEAST_SHARE = 0.1
_NEEDED = ("input", "output")
"""Kinds without which modules cannot be fed from the reference."""


class Counterpart(NamedTuple):
    """The columns of a reference record that a check needs."""

    seq: int
    cls: str
    dtype: str
    shape: tuple[int, ...]
    tensor: int
    digest: int
    l2: float
    location: Location | None
    parts: tuple[Counterpart, ...] = ()
    """Records of which it is the sum, if it is none of its own."""


class ReferenceRecords:
    """One rank of a run, by key. `rename` maps the model's module names to the run's."""

    def __init__(self, run: Run, rank: int, rename: Callable[[str], str]) -> None:
        if rank not in run.ranks:
            ranks = ", ".join(map(str, run.ranks)) or "none at all"
            raise UsageError(
                f"this is rank {rank}, and {run.path} has ranks {ranks}: capture the reference on the same ranks"
            )
        self.run = run
        self.rank = rank
        self.rename = rename
        self._rows = run.index(rank)
        self._step: int | None = None
        self._known: dict[Key, Counterpart] = {}
        self._coarsest: dict[tuple[str, int], str] = {}
        self._given_to: dict[tuple[int, int], list[Key]] = {}
        """Micro step and number of a tensor → the inputs of modules that it is."""
        self._returned_by: dict[tuple[int, int], list[str]] = {}
        """Micro step and number of a tensor → the modules that return it."""
        self._is_repeated = False
        """Whether something in the step has several records, as gradients of several backwards do."""
        self._template: Record | None = None
        self._last: tuple[tuple[Location, tuple[int, ...]] | None, npt.NDArray[Any]] = (None, np.empty(0))
        self.modules: Collection[str] = set(pc.unique(self._rows.column("module")).to_pylist())
        self.steps: list[int] = sorted(pc.unique(self._rows.column("step")).to_pylist())
        found = set(pc.unique(self._rows.column("kind")).to_pylist())
        self.kinds = tuple(kind for kind in MODULE_KINDS if kind in found)

    def check_kept(self) -> None:
        """Raise UsageError if the run has no tensors to feed modules with."""
        kept = self._rows.filter(pc.is_valid(self._rows.column("file")))
        kinds = set(pc.unique(kept.column("kind")).to_pylist())
        if missing := [kind for kind in _NEEDED if kind not in kinds]:
            kinds_to_keep = tuple(dict.fromkeys((*_NEEDED, "grad_input", "grad_output", "param_grad", *self.kinds)))
            raise UsageError(
                f"{self.run.path} has no {' and no '.join(missing)} tensors to feed the modules with: capture the "
                f'reference with tensortap.capture(model, path, keep="tensors", kinds={kinds_to_keep}), or check with '
                "isolate=False"
            )

    def unkept(self) -> set[str]:
        """Return the modules whose inputs and outputs were recorded but not kept: they cannot be fed."""
        flowing = self._rows.filter(pc.is_in(self._rows.column("kind"), pa.array(_NEEDED)))
        kept = flowing.filter(pc.is_valid(flowing.column("file")))
        seen, whole = (set(pc.unique(rows.column("module")).to_pylist()) for rows in (flowing, kept))
        return seen - whole

    def check_names(self, names: Iterable[str]) -> None:
        """Raise UsageError if too few modules of the run are in the model."""
        found = sum(self.has(name) for name in names)
        if found < _LEAST_SHARE * len(self.modules):
            some = ", ".join(map(display_name, sorted(self.modules)[:4]))
            raise UsageError(
                f"only {found} of the {len(self.modules)} modules of {self.run.path} are in the model; it calls them "
                f"{some}, ...: pass rename=['PATTERN=REPLACEMENT'] to map the model's names to these"
            )

    def has(self, module: str) -> bool:
        return self.rename(module) in self.modules

    def get(self, key: Key) -> Counterpart | None:
        """Return the reference's record of a key; None if it has none."""
        return self._records(key.step).get(key._replace(module=self.rename(key.module)))

    def over_backwards(self, key: Key) -> Counterpart | None:
        """Return the sum of a gradient's parts, if the reference has one for each of several backwards."""
        self._records(key.step)
        if not self._is_repeated or "~" in key.path or (first := self.get(key)) is None:
            return None
        parts = [first]
        while (more := self.get(key._replace(path=f"{key.path}~{len(parts) + 1}"))) is not None:
            parts.append(more)
        if len(parts) < 2 or any(part.location is None or part.shape != first.shape for part in parts):
            return None
        return first._replace(parts=tuple(parts), digest=0, l2=float("nan"))

    def from_outside(self, key: Key) -> Counterpart | None:
        """Return the share of an output's gradient that does not come from inside the module that returns it: the sum
        of what the modules outside sent back. None if no other module got the output, or some gradient was not kept."""
        whole, users = self.get(key), self.given_outside(key)
        sent = [self._known.get(each._replace(phase="backward", kind="grad_input")) for each in users]
        parts = tuple(each for each in sent if each is not None and each.location is not None)
        if whole is None or not sent or len(parts) < len(sent) or any(part.shape != whole.shape for part in parts):
            return None
        return whole._replace(parts=parts, digest=0, l2=float("nan"))

    def given_outside(self, key: Key) -> list[Key]:
        """Return the inputs of other modules that an output is, or a gradient's; without those inside another user."""
        output = self.get(key._replace(phase="forward", kind="output"))
        if output is None:
            return []
        own = self.rename(key.module)
        given = [each for each in self._given_to.get((key.micro, output.tensor), ()) if not is_within(each.module, own)]
        users = {each.module for each in given}
        return [each for each in given if not any(is_within(each.module, user) for user in users)]

    def shows_inside(self, name: str) -> bool:
        """Whether modules inside one were seen to run: else its recorded gradients lack the inner share, too."""
        own = self.rename(name)
        return any(is_within(module, own) for module in self._called)

    @cached_property
    def _called(self) -> frozenset[str]:
        outputs = self._rows.filter(pc.equal(self._rows.column("kind"), "output"))
        return frozenset(pc.unique(outputs.column("module")).to_pylist())

    def makers(self, of: Key) -> list[str]:
        """Return the modules that return the value of an output, in the reference's names."""
        output = self.get(of)
        return [] if output is None else self._returned_by.get((of.micro, output.tensor), [])

    def coarsest(self, key: Key) -> str | None:
        """Return the coarsest dtype among a call's inputs and outputs; None if none is floating-point."""
        self.get(key)
        return self._coarsest.get((self.rename(key.module), key.call))

    def values(self, found: Counterpart) -> npt.NDArray[Any]:
        """Return the recorded tensor, read-only."""
        if found.parts:
            first, *others = (self.values(part) for part in found.parts)
            wide = sum((each.astype(np.float64) for each in others), first.astype(np.float64))
            return wide.astype(first.dtype)
        assert found.location is not None
        place = found.location, found.shape  # tensors without elements have one location
        if place != self._last[0]:
            # One Record serves as a template, because building one for each tensor is slow.
            self._template = self._template or self.run.at(self.rank, 0)
            record = replace(self._template, dtype=found.dtype, shape=found.shape, location=found.location)
            self._last = place, self.run.load(record)
        return self._last[1]

    def _records(self, step: int) -> Mapping[Key, Counterpart]:
        """Return the records of a step, which stay known until another one is asked for."""
        if step != self._step:
            self._step, self._known = step, self._read_step(step)
        return self._known

    def _read_step(self, step: int) -> dict[Key, Counterpart]:
        rows = self._rows.filter(pc.equal(self._rows.column("step"), pa.scalar(step, pa.int64())))
        keys = zip(*(rows.column(name).to_pylist() for name in Key._fields), strict=True)
        columns = zip(*(rows.column(name).to_pylist() for name in _COLUMNS), strict=True)
        found: dict[Key, Counterpart] = {}
        self._coarsest.clear()
        self._given_to.clear()
        self._returned_by.clear()
        self._is_repeated = False
        for key, (seq, cls, dtype, shape, tensor, digest, l2, *place) in zip(keys, columns, strict=True):
            location = None if place[0] is None else Location(*place)
            found.setdefault(Key(*key), Counterpart(seq, cls, dtype, tuple(shape), tensor, digest, l2, location))
            self._is_repeated = self._is_repeated or "~" in key[6]
            if key[5] == "input":
                self._given_to.setdefault((key[1], tensor), []).append(Key(*key))
            elif key[5] == "output":
                self._returned_by.setdefault((key[1], tensor), []).append(key[3])
            if key[5] in _NEEDED and dtype in EPSILON:
                _, _, _, module, number, *_ = key
                known = self._coarsest.setdefault((module, number), dtype)
                self._coarsest[module, number] = max(known, dtype, key=EPSILON.__getitem__)
        return found

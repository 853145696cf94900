"""One call of one module in a run: its own records, and those of all that ran within it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensortap.core.arguments import read
from tensortap.core.records import Key, Record, display_name
from tensortap.errors import UsageError
from tensortap.store import Run, RunWriter

__all__ = ["Excerpt", "Place", "copied", "excerpt"]

_STORES_OWN = ("format", "version", "world", "started")
"""What run.json says of the file itself."""


@dataclass(frozen=True)
class Place:
    """Which call is meant; None is the first that there is."""

    module: str
    step: int | None = None
    micro: int | None = None
    call: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Excerpt:
    """The records of one call, in execution order."""

    run: Run
    rank: int
    module: str
    cls: str
    step: int
    micro: int
    call: int
    records: Sequence[Record]
    first_calls: Mapping[str, int]
    """For the module and each one within it: the number of its first call in here."""
    notes: Sequence[str]

    def of(self, kind: str) -> dict[str, Record]:
        """The module's own records of a kind, by path."""
        return {r.key.path: r for r in self.records if r.key.kind == kind and r.key.module == self.module}

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The plain arguments of the module's call, by path; None if they were not recorded."""
        calls = self.run.calls(self.rank)
        return None if calls is None else read(calls.of(self.step, self.micro, self.module, self.call))

    @property
    def kinds(self) -> set[str]:
        return {record.key.kind for record in self.records}

    def without(self, kinds: Iterable[str], note: str) -> Excerpt:
        """The same but for some kinds, and why."""
        left_out = set(kinds)
        kept = [record for record in self.records if record.key.kind not in left_out]
        return replace(self, records=kept, notes=[*self.notes, note])

    def inside(self, name: str) -> str:
        """The name within the run of a module that the replayed one calls `name`."""
        return ".".join(part for part in (self.module, name) if part)

    def placed(self, key: Key) -> Key:
        """A key of the module run alone, as the run would have had it."""
        module = self.inside(key.module)
        if key.phase == "state":
            return key._replace(step=self.step, module=module)
        first = 0 if key.kind == "param_grad" else self.first_calls.get(module, 0)
        return key._replace(step=self.step, micro=self.micro, module=module, call=key.call + first)


class _Within:
    """The names of a module and of all its parts."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __contains__(self, name: object) -> bool:
        return not self._module or name == self._module or str(name).startswith(f"{self._module}.")


def excerpt(run: Run, place: Place) -> Excerpt:
    """All that the run has of the call."""
    rank = _rank(run, place)
    own = list(run.records(rank=rank, module=_Exactly(place.module)))
    if not own:
        raise UsageError(f"{run.path} has no records of {display_name(place.module)}{_close(run, place.module)}")
    step, micro, call = _chosen(run, own, place)
    records = list(run.records(rank=rank, module=_Within(place.module), step=step))
    forward = [r for r in records if r.key.phase == "forward" and r.key.micro == micro]
    span = [r.seq for r in forward if r.key.module == place.module and r.key.call == call]
    within = [r for r in forward if min(span) <= r.seq <= max(span)]
    calls = {(r.key.module, r.key.call) for r in within}
    again = {r.key.module for r in forward if (r.key.module, r.key.call) not in calls}
    first_calls: dict[str, int] = {}
    for module, number in sorted(calls):
        first_calls.setdefault(module, number)

    def wanted(record: Record) -> bool:
        key = record.key
        if key.phase == "state":
            return key.call == 0
        if key.micro != micro:
            return False
        if key.kind == "param_grad":
            return key.module not in again
        return (key.module, key.call) in calls

    notes = []
    if again and any(r.key.kind == "param_grad" and r.key.module in again for r in records):
        notes.append(
            f"gradients of parameters are the sum over all calls of a micro step; those of {_few(again)}, which ran "
            "more than once, are not compared"
        )
    return Excerpt(
        run, rank, place.module, own[0].cls, step, micro, call, [r for r in records if wanted(r)], first_calls, notes
    )


def copied(source: Run, records: Iterable[Record], out: Path, key_of: Callable[[Key], Key] = lambda key: key) -> None:
    """Some records of a run as a run of their own, perhaps under other names."""
    info = {name: value for name, value in source.info.items() if name not in _STORES_OWN}
    known = {rank: calls for rank in source.ranks if (calls := source.calls(rank)) is not None}
    with RunWriter(out, info=info, calls=bool(known)) as writer:
        kept: dict[int, Any] = {}
        told: set[tuple[int, int, str, int]] = set()
        for record in records:
            key, own = key_of(record.key), record.key
            call = key.step, key.micro, key.module, key.call
            if key.phase == "forward" and call not in told and record.rank in known:
                told.add(call)
                writer.called(*call, known[record.rank].of(own.step, own.micro, own.module, own.call))
            if record.location is not None and record.tensor not in kept:
                kept[record.tensor] = writer.put(f"{key}", source.load(record), step=key.step)
            location = None if record.location is None else kept[record.tensor]
            writer.append(replace(record, key=key, rank=0, location=location))


class _Exactly:
    """One name, in which no sign means anything but itself."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __contains__(self, name: object) -> bool:
        return name == self._name


def _chosen(run: Run, own: Sequence[Record], place: Place) -> tuple[int, int, int]:
    """The first call that is meant and whose inputs are all there."""
    asked = {name: value for name in ("step", "micro", "call") if (value := getattr(place, name)) is not None}

    def meant(record: Record) -> bool:
        return all(getattr(record.key, name) == value for name, value in asked.items())

    said = ", ".join(f"{name} {value}" for name, value in asked.items())
    where = f"{run.path} has {{}} of {display_name(place.module)}{' in ' + said if said else ''}"
    forward = [r for r in own if r.key.phase == "forward"]
    if forward and not any(map(meant, forward)):
        have = sorted({(r.key.step, r.key.micro, r.key.call) for r in forward})
        first = ", ".join(f"step {step} micro {micro} call {call}" for step, micro, call in have[:4])
        raise UsageError(f"{where.format('no call')}; it has {first}{' …' if len(have) > 4 else ''}")
    inputs = [r for r in forward if r.key.kind == "input" and meant(r)]
    keep = f'keep={{"{display_name(place.module)}": "tensors", "*": "summary"}}'
    how = f'capture with {keep} and kinds=("input", "output", "grad_output", "param")'
    if not inputs:
        raise UsageError(f"{where.format('no inputs')}: {how}")
    calls: dict[tuple[int, int, int], bool] = {}
    for record in inputs:
        key = record.key
        call = (key.step, key.micro, key.call)
        calls[call] = calls.get(call, True) and record.location is not None
    whole = [call for call, kept in sorted(calls.items()) if kept]
    if not whole:
        raise UsageError(f"{where.format('only summaries of the inputs')}: {how}")
    return whole[0]


def _rank(run: Run, place: Place) -> int:
    if place.rank is None and run.ranks:
        return run.ranks[0]
    if place.rank not in run.ranks:
        raise UsageError(f"{run.path} has no rank {place.rank}; it has {', '.join(map(str, run.ranks)) or 'none'}")
    return place.rank


def _close(run: Run, name: str) -> str:
    names = sorted({row.module for rows in run.coverage.values() for row in rows})
    close = [display_name(each) for each in difflib.get_close_matches(name, names, 3, 0.4)]
    return f"; did you mean {', '.join(close)}?" if close else ""


def _few(names: Iterable[str]) -> str:
    listed = [display_name(name) for name in sorted(names)]
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")

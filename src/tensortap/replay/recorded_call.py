"""Finds the records of one call of one module in a run, with those of all modules that ran inside it."""

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

__all__ = ["CallSelector", "RecordedCall", "copy_records", "find_call"]

_STORES_OWN = ("format", "version", "world", "started")
"""Entries of run.json that the writer sets itself."""


@dataclass(frozen=True)
class CallSelector:
    """Selects a call of a module; None selects the first."""

    module: str
    step: int | None = None
    micro: int | None = None
    call: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class RecordedCall:
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
    """Module → number of its first call in these records, for the module and each one inside it."""
    notes: Sequence[str]

    def of(self, kind: str) -> dict[str, Record]:
        """Return the module's own records of a kind, by path."""
        return {r.key.path: r for r in self.records if r.key.kind == kind and r.key.module == self.module}

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The plain arguments of the call, by path; None if the run did not record any."""
        calls = self.run.calls(self.rank)
        return None if calls is None else read(calls.of(self.step, self.micro, self.module, self.call))

    @property
    def kinds(self) -> set[str]:
        return {record.key.kind for record in self.records}

    def without(self, kinds: Iterable[str], note: str) -> RecordedCall:
        """Return a copy without some kinds, and with a note that says why."""
        left_out = set(kinds)
        kept = [record for record in self.records if record.key.kind not in left_out]
        return replace(self, records=kept, notes=[*self.notes, note])

    def inside(self, name: str) -> str:
        """Return a module's name in the run from its name relative to the replayed module."""
        return ".".join(part for part in (self.module, name) if part)

    def to_run_key(self, key: Key) -> Key:
        """Return the key that the run has for a key of the module replayed alone."""
        module = self.inside(key.module)
        if key.phase == "state":
            return key._replace(step=self.step, module=module)
        first = 0 if key.kind == "param_grad" else self.first_calls.get(module, 0)
        return key._replace(step=self.step, micro=self.micro, module=module, call=key.call + first)


class _Subtree:
    """The names of a module and of all modules below it."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __contains__(self, name: object) -> bool:
        return not self._module or name == self._module or str(name).startswith(f"{self._module}.")


def find_call(run: Run, selector: CallSelector) -> RecordedCall:
    """Return all records of the selected call."""
    rank = _rank(run, selector)
    own = list(run.records(rank=rank, module=_ExactName(selector.module)))
    if not own:
        raise UsageError(
            f"{run.path} has no records of {display_name(selector.module)}{_suggest(run, selector.module)}"
        )
    step, micro, call = _choose_call(run, own, selector)
    records = list(run.records(rank=rank, module=_Subtree(selector.module), step=step))
    forward = [r for r in records if r.key.phase == "forward" and r.key.micro == micro]
    span = [r.seq for r in forward if r.key.module == selector.module and r.key.call == call]
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
        if key.micro != micro or key.phase == "eval":
            return False
        if key.kind == "param_grad":
            return key.module not in again
        return (key.module, key.call) in calls

    notes = []
    if again and any(r.key.kind == "param_grad" and r.key.module in again for r in records):
        notes.append(
            f"gradients of parameters are sums over all calls of a micro step; those of {_few(again)}, which ran more "
            "than once, are not compared"
        )
    return RecordedCall(
        run, rank, selector.module, own[0].cls, step, micro, call, [r for r in records if wanted(r)], first_calls, notes
    )


def copy_records(
    source: Run, records: Iterable[Record], out: Path, key_of: Callable[[Key], Key] = lambda key: key
) -> None:
    """Write some records of a run as a new run; `key_of` returns their new keys."""
    info = {name: value for name, value in source.info.items() if name not in _STORES_OWN}
    known = {rank: calls for rank in source.ranks if (calls := source.calls(rank)) is not None}
    with RunWriter(out, info=info, calls=bool(known)) as writer:
        kept: dict[int, Any] = {}
        written: set[tuple[int, int, str, int]] = set()
        for record in records:
            key, own = key_of(record.key), record.key
            call = key.step, key.micro, key.module, key.call
            if key.phase == "forward" and call not in written and record.rank in known:
                written.add(call)
                writer.called(*call, known[record.rank].of(own.step, own.micro, own.module, own.call))
            if record.location is not None and record.tensor not in kept:
                kept[record.tensor] = writer.put(f"{key}", source.load(record), step=key.step)
            location = None if record.location is None else kept[record.tensor]
            writer.append(replace(record, key=key, rank=0, location=location))


class _ExactName:
    """A single module name, without wildcards."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __contains__(self, name: object) -> bool:
        return name == self._name


def _choose_call(run: Run, own: Sequence[Record], selector: CallSelector) -> tuple[int, int, int]:
    """Return step, micro step and number of the first selected call whose inputs the run kept."""
    asked = {name: value for name in ("step", "micro", "call") if (value := getattr(selector, name)) is not None}

    def is_selected(record: Record) -> bool:
        return all(getattr(record.key, name) == value for name, value in asked.items())

    selected = ", ".join(f"{name} {value}" for name, value in asked.items())
    where = f"{run.path} has {{}} of {display_name(selector.module)}{' in ' + selected if selected else ''}"
    forward = [r for r in own if r.key.phase == "forward"]
    if forward and not any(map(is_selected, forward)):
        existing = sorted({(r.key.step, r.key.micro, r.key.call) for r in forward})
        first = ", ".join(f"step {step} micro {micro} call {call}" for step, micro, call in existing[:4])
        raise UsageError(f"{where.format('no call')}; it has {first}{' …' if len(existing) > 4 else ''}")
    inputs = [r for r in forward if r.key.kind == "input" and is_selected(r)]
    advice = f'capture with {_keep_for(run, selector.module)} and kinds=("input", "output", "grad_output", "param")'
    if not inputs:
        raise UsageError(f"{where.format('no inputs')}: {advice}")
    calls: dict[tuple[int, int, int], bool] = {}
    for record in inputs:
        key = record.key
        call = (key.step, key.micro, key.call)
        calls[call] = calls.get(call, True) and record.location is not None
    whole = [call for call, kept in sorted(calls.items()) if kept]
    if not whole:
        raise UsageError(f"{where.format('only summaries of the inputs')}: {advice}")
    return whole[0]


def _keep_for(run: Run, module: str) -> str:
    """Return the `keep=` that keeps the call of a module, and the parameters of all modules inside it."""
    if not module:
        return 'keep="tensors"'
    patterns = [module]
    if any(record.key.module != module for record in run.records(module=_Subtree(module))):
        patterns.append(f"{module}.*")
    kept = ", ".join(f'"{pattern}": "tensors"' for pattern in patterns)
    return f'keep={{{kept}, "*": "summary"}}'


def _rank(run: Run, selector: CallSelector) -> int:
    if selector.rank is None and run.ranks:
        return run.ranks[0]
    if selector.rank not in run.ranks:
        raise UsageError(f"{run.path} has no rank {selector.rank}; it has {', '.join(map(str, run.ranks)) or 'none'}")
    return selector.rank


def _suggest(run: Run, name: str) -> str:
    names = sorted({row.module for rows in run.coverage.values() for row in rows})
    close = [display_name(each) for each in difflib.get_close_matches(name, names, 3, 0.4)]
    return f"; did you mean {', '.join(close)}?" if close else ""


def _few(names: Iterable[str]) -> str:
    listed = [display_name(name) for name in sorted(names)]
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")

"""The book of an audit: what happened to each tensor and to the model, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensortap.model.audit_outcome import LoadOutcome, in_effect, renamed
from tensortap.report.audit_page import ORDER, AuditFacts, Event, Happening

__all__ = ["AuditBook"]

_NEAR = 3
"""Happenings among which a repetition is looked for: a loop's forward and step alternate."""


class AuditBook:
    """Plain data; knows no framework."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}
        self.happenings: list[Happening] = []
        self.loads: list[LoadOutcome] = []
        self.notes: dict[str, None] = {}

    def add(self, name: str, event: Event) -> None:
        """The same thing again at the same place is one event that happened several times."""
        event = replace(event, last_step=event.step)
        life = self.events.setdefault(name, [])
        last = life[-1] if life else event
        again = (last.what, last.where, last.detail) == (event.what, event.where, event.detail)
        if life and again and event.what in ("stepped", "forward", "changed"):
            largest = _larger(last.rel_l2, event.rel_l2)
            life[-1] = replace(last, times=last.times + 1, last_step=event.step, rel_l2=largest)
            return
        life.append(event)

    def happened(self, what: str, where: str, step: int, changes: Sequence[float], once: bool = False) -> None:
        largest = float("nan")
        for change in changes:
            largest = _larger(largest, change)
        for known in self.happenings[-_NEAR:] if not once else ():
            if (known.what, known.where) == (what, where):
                known.times += 1
                known.last_step = step
                known.tensors = max(known.tensors, len(changes))
                known.largest = _larger(known.largest, largest)
                return
        self.happenings.append(Happening(what, where, step, step, len(changes), largest))

    def note(self, text: str) -> None:
        self.notes[text] = None

    def status(self, name: str, kind: str) -> tuple[str, str]:
        """What became of a tensor, and what to add to its name."""
        events = self.events[name]
        loads = [at for at, event in enumerate(events) if event.what == "loaded"]
        strange = [at for at, event in enumerate(events) if _strange(event, kind)]
        if loads:
            if strange and strange[-1] > loads[-1]:
                event = events[strange[-1]]
                return "overwritten", f"by a forward at {event.where}" if event.what == "forward" else _noticed(event)
            return ("loaded" if any(events[at].changed for at in loads) else "identical"), ""
        if strange:
            return "set", _noticed(events[strange[-1]])
        if (unfit := self._unfit(name)) is not None:
            return unfit
        return ("untouched" if all(event.what == "initialised" for event in events) else "trained"), ""

    @property
    def unexpected(self) -> dict[str, str]:
        """Key → where it was in a checkpoint without a place in the model."""
        return {key: load.where for load in in_effect(self.loads) for key in load.unplaced()}

    def _unfit(self, name: str) -> tuple[str, str] | None:
        """Why no load gave it a value, if one was meant to. Another shape says more than a key that is not there."""
        told = [(*load.told[name], load.where) for load in in_effect(self.loads) if name in load.told]
        for status in ("mismatch", "missing"):
            for what, detail, where in reversed(told):
                if what == status:
                    return status, " ".join(filter(None, (detail, self._place(where))))
        return None

    def _place(self, where: str) -> str:
        """Which load is meant, where there is more than one."""
        return f"at {where}" if len(self.loads) > 1 else ""

    def facts(self, model: str, kinds: Mapping[str, str], steps: int, notes: Sequence[str]) -> AuditFacts:
        names: dict[str, list[tuple[str, str]]] = {status: [] for status in ORDER}
        for name in self.events:
            status, extra = self.status(name, kinds[name])
            names[status].append((name, extra))
        names["unexpected"] = [(key, self._place(where)) for key, where in self.unexpected.items()]
        prefixes = [
            note for load in in_effect(self.loads) for note in renamed(load, f" {self._place(load.where)}".rstrip())
        ]
        parameters = sum(kinds[name] == "parameter" for name in self.events)
        return AuditFacts(
            model,
            parameters,
            len(self.events) - parameters,
            steps,
            names,
            [replace(happening) for happening in self.happenings],
            [*self.notes, *prefixes, *notes],
            [(load.where, len(load.gave)) for load in self.loads],
        )

    def as_dict(self, facts: AuditFacts, kinds: Mapping[str, str]) -> dict[str, Any]:
        """Everything, ready for json.dumps."""
        return {
            "model": facts.model,
            "parameters": facts.parameters,
            "buffers": facts.buffers,
            "steps": facts.steps,
            "counts": {status: len(found) for status, found in facts.names.items()},
            "tensors": {
                name: {
                    "kind": kinds[name],
                    "status": self.status(name, kinds[name])[0],
                    "events": [event.as_dict() for event in events],
                }
                for name, events in self.events.items()
            },
            "unexpected": self.unexpected,
            "happenings": [happening.as_dict() for happening in facts.happenings],
            "notes": list(facts.notes),
        }


def _strange(event: Event, kind: str) -> bool:
    """A change that no load and no optimizer made. Forwards may move buffers: running statistics live there."""
    return event.what == "changed" or (event.what == "forward" and kind == "parameter")


def _noticed(event: Event) -> str:
    return event.detail or (f"noticed at {event.where}" if event.where else "")


def _larger(left: float, right: float) -> float:
    return right if math.isnan(left) else left if math.isnan(right) else max(left, right)

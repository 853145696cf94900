"""The book of an audit: what happened to each tensor and to the model, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensortap.frameworks.registered import Registration
from tensortap.model.audit.ledger import Change
from tensortap.model.audit.outcome import LoadOutcome, in_effect, renamed
from tensortap.model.audit.undo import UndoneLoadDetector
from tensortap.report.terminal.audit import ORDER, AuditFacts, Event, Happening, UndoneFacts

__all__ = ["AuditLog"]

_NEAR = 3
"""Happenings among which a repetition is looked for: a loop's forward and step alternate."""


class AuditLog:
    """Plain data; knows no framework."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}
        self.happenings: list[Happening] = []
        self.loads: list[LoadOutcome] = []
        self.notes: dict[str, None] = {}
        self.undo = UndoneLoadDetector()

    def add(self, name: str, event: Event) -> None:
        """The same thing again at the same place is one event that happened several times."""
        event = replace(event, last_step=event.step)
        life = self.events.setdefault(name, [])
        last = life[-1] if life else event
        again = (last.what, last.where, last.detail) == (event.what, event.where, event.detail)
        if life and again and event.what in ("stepped", "forward", "changed"):
            life[-1] = replace(
                last,
                times=last.times + 1,
                last_step=event.step,
                rel_l2=_larger(last.rel_l2, event.rel_l2),
                l2=_larger(last.l2, event.l2),
            )
            return
        life.append(event)

    def happened(self, what: str, where: str, step: int, changes: Collection[Change], once: bool = False) -> None:
        """Add what happened to the model; the same thing again at the same place counts up."""
        relative = absolute = math.nan
        for change in changes:
            if math.isnan(change.rel_l2):
                absolute = _larger(absolute, change.l2)
            relative = _larger(relative, change.rel_l2)
        for known in self.happenings[-_NEAR:] if not once else ():
            if (known.what, known.where) == (what, where):
                known.times += 1
                known.last_step = step
                known.tensors = max(known.tensors, len(changes))
                known.largest = _larger(known.largest, relative)
                known.largest_l2 = _larger(known.largest_l2, absolute)
                return
        self.happenings.append(Happening(what, where, step, step, len(changes), relative, largest_l2=absolute))

    def note(self, text: str) -> None:
        """Add a remark, once; an empty one is none."""
        if text:
            self.notes[text] = None

    def status(self, name: str, registration: Registration) -> tuple[str, str]:
        """What became of a tensor, and what to add to its name."""
        events = self.events[name]
        loads = [at for at, event in enumerate(events) if event.what == "loaded"]
        strange = [at for at, event in enumerate(events) if _strange(event, registration)]
        if self.undo.undone(name) is not None:
            return "undone", ""
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

    def facts(self, model: str, known: Mapping[str, Registration], steps: int, notes: Sequence[str]) -> AuditFacts:
        names: dict[str, list[tuple[str, str]]] = {status: [] for status in ORDER}
        for name in self.events:
            status, extra = self.status(name, known[name])
            names[status].append((name, extra))
        names["unexpected"] = [(key, self._place(where)) for key, where in self.unexpected.items()]
        prefixes = [
            note for load in in_effect(self.loads) for note in renamed(load, f" {self._place(load.where)}".rstrip())
        ]
        parameters = sum(known[name].parameter for name in self.events)
        return AuditFacts(
            model,
            parameters,
            len(self.events) - parameters,
            steps,
            names,
            [replace(happening) for happening in self.happenings],
            [*self.notes, *prefixes, *notes],
            [(load.where, len(load.gave)) for load in self.loads],
            sum(known[name].statistics for name in self.events),
            sum(not known[name].saved for status in ("untouched", "trained") for name, _ in names[status]),
            self._undone([name for name, _ in names["undone"]]),
        )

    def _undone(self, names: Sequence[str]) -> list[UndoneFacts]:
        """The undone loads, each event that undid some of them once."""
        found: dict[tuple[Any, ...], UndoneFacts] = {}
        for name in names:
            if (undone := self.undo.undone(name)) is not None:
                key = (undone.step, undone.by, undone.where, undone.values)
                shares = (*found[key].shares, undone.share) if key in found else (undone.share,)
                found[key] = UndoneFacts(*key, shares)
        return list(found.values())

    def as_dict(self, facts: AuditFacts, known: Mapping[str, Registration]) -> dict[str, Any]:
        """Everything, ready for json.dumps."""
        return {
            "model": facts.model,
            "parameters": facts.parameters,
            "buffers": facts.buffers,
            "statistics": facts.statistics,
            "steps": facts.steps,
            "counts": {status: len(found) for status, found in facts.names.items()},
            "tensors": {
                name: {
                    "kind": known[name].kind,
                    "statistics": known[name].statistics,
                    "status": self.status(name, known[name])[0],
                    "undone": None if (undone := self.undo.undone(name)) is None else undone.as_dict(),
                    "events": [event.as_dict() for event in events],
                }
                for name, events in self.events.items()
            },
            "unexpected": self.unexpected,
            "happenings": [happening.as_dict() for happening in facts.happenings],
            "notes": list(facts.notes),
        }


def _strange(event: Event, registration: Registration) -> bool:
    """A change that neither a load nor an optimizer made. A forward may update buffers and running statistics."""
    return event.what == "changed" or (event.what == "forward" and registration.trained)


def _noticed(event: Event) -> str:
    return event.detail or (f"noticed at {event.where}" if event.where else "")


def _larger(left: float, right: float) -> float:
    return right if math.isnan(left) else left if math.isnan(right) else max(left, right)

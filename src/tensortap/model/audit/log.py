"""The log of an audit: events of each tensor and of the model, and the status that follows from them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensortap.frameworks.registered import TensorRegistration
from tensortap.model.audit.loads import LoadOutcome, describe_renamed_keys, loads_in_effect
from tensortap.model.audit.snapshots import Change
from tensortap.model.audit.undone_loads import UndoneLoadDetector
from tensortap.report.terminal.audit import ORDER, AuditFacts, Event, ModelEvent, UndoneFacts

__all__ = ["AuditLog"]

_RECENT = 3
"""Number of latest model events that a repetition may count up: forward and step of a loop alternate."""


class AuditLog:
    """Events, loads and notes of one audit, as plain data."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}
        self.model_events: list[ModelEvent] = []
        self.loads: list[LoadOutcome] = []
        self.notes: dict[str, None] = {}
        self.undone_loads = UndoneLoadDetector()

    def add(self, name: str, event: Event) -> None:
        """Add an event of a tensor. Repeated steps, forwards and changes at one line count up a single event."""
        event = replace(event, last_step=event.step)
        history = self.events.setdefault(name, [])
        last = history[-1] if history else event
        again = (last.what, last.where, last.detail) == (event.what, event.where, event.detail)
        if history and again and event.what in ("stepped", "forward", "changed"):
            history[-1] = replace(
                last,
                times=last.times + 1,
                last_step=event.step,
                rel_l2=_max_ignoring_nan(last.rel_l2, event.rel_l2),
                l2=_max_ignoring_nan(last.l2, event.l2),
            )
            return
        history.append(event)

    def add_model_event(
        self, what: str, where: str, step: int, changes: Collection[Change], once: bool = False
    ) -> None:
        """Add an event of the model. Unless `once`, a recent event of the same kind and line counts up instead."""
        relative = absolute = math.nan
        for change in changes:
            if math.isnan(change.rel_l2):
                absolute = _max_ignoring_nan(absolute, change.l2)
            relative = _max_ignoring_nan(relative, change.rel_l2)
        for known in self.model_events[-_RECENT:] if not once else ():
            if (known.what, known.where) == (what, where):
                known.times += 1
                known.last_step = step
                known.tensors = max(known.tensors, len(changes))
                known.largest = _max_ignoring_nan(known.largest, relative)
                known.largest_l2 = _max_ignoring_nan(known.largest_l2, absolute)
                return
        self.model_events.append(ModelEvent(what, where, step, step, len(changes), relative, largest_l2=absolute))

    def note(self, text: str) -> None:
        """Add a note, unless it is empty or already there."""
        if text:
            self.notes[text] = None

    def status(self, name: str, registration: TensorRegistration) -> tuple[str, str]:
        """Return the status of a tensor, and a remark to show after its name."""
        events = self.events[name]
        loads = [at for at, event in enumerate(events) if event.what == "loaded"]
        unexplained = [at for at, event in enumerate(events) if _is_unexplained(event, registration)]
        if self.undone_loads.find(name) is not None:
            return "undone", ""
        if loads:
            if unexplained and unexplained[-1] > loads[-1]:
                event = events[unexplained[-1]]
                by_forward = event.what == "forward"
                return "overwritten", f"by a forward at {event.where}" if by_forward else _where_noticed(event)
            return ("loaded" if any(events[at].changed for at in loads) else "identical"), ""
        if unexplained:
            return "set", _where_noticed(events[unexplained[-1]])
        if (reason := self._why_not_loaded(name)) is not None:
            return reason
        return ("untouched" if all(event.what == "initialised" for event in events) else "trained"), ""

    @property
    def unexpected(self) -> dict[str, str]:
        """Checkpoint key that matches no tensor of the model → line of the load."""
        return {key: load.where for load in loads_in_effect(self.loads) for key in load.unexpected_names()}

    def _why_not_loaded(self, name: str) -> tuple[str, str] | None:
        """Return status and remark if a load targeted the tensor but did not set it.

        A mismatch comes before a missing key, because it says more.
        """
        results = [(*load.results[name], load.where) for load in loads_in_effect(self.loads) if name in load.results]
        for status in ("mismatch", "missing"):
            for what, detail, where in reversed(results):
                if what == status:
                    return status, " ".join(filter(None, (detail, self._at_load(where))))
        return None

    def _at_load(self, where: str) -> str:
        """Return the remark that names the load, if there is more than one."""
        return f"at {where}" if len(self.loads) > 1 else ""

    def facts(
        self, model: str, known: Mapping[str, TensorRegistration], steps: int, notes: Sequence[str]
    ) -> AuditFacts:
        names: dict[str, list[tuple[str, str]]] = {status: [] for status in ORDER}
        for name in self.events:
            status, extra = self.status(name, known[name])
            names[status].append((name, extra))
        names["unexpected"] = [(key, self._at_load(where)) for key, where in self.unexpected.items()]
        renamed = [
            note
            for load in loads_in_effect(self.loads)
            for note in describe_renamed_keys(load, f" {self._at_load(load.where)}".rstrip())
        ]
        parameters = sum(known[name].parameter for name in self.events)
        return AuditFacts(
            model,
            parameters,
            len(self.events) - parameters,
            steps,
            names,
            [replace(event) for event in self.model_events],
            [*self.notes, *renamed, *notes],
            [(load.where, len(load.loaded)) for load in self.loads],
            sum(known[name].statistics for name in self.events),
            sum(not known[name].saved for status in ("untouched", "trained") for name, _ in names[status]),
            self._undone_facts([name for name, _ in names["undone"]]),
        )

    def _undone_facts(self, names: Sequence[str]) -> list[UndoneFacts]:
        """Return one entry for each event that undid loads."""
        found: dict[tuple[Any, ...], UndoneFacts] = {}
        for name in names:
            if (undone := self.undone_loads.find(name)) is not None:
                key = (undone.step, undone.by, undone.where, undone.values)
                shares = (*found[key].shares, undone.share) if key in found else (undone.share,)
                found[key] = UndoneFacts(*key, shares)
        return list(found.values())

    def as_dict(self, facts: AuditFacts, known: Mapping[str, TensorRegistration]) -> dict[str, Any]:
        """Return the whole log, ready for json.dumps."""
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
                    "undone": None if (undone := self.undone_loads.find(name)) is None else undone.as_dict(),
                    "events": [event.as_dict() for event in events],
                }
                for name, events in self.events.items()
            },
            "unexpected": self.unexpected,
            "happenings": [event.as_dict() for event in facts.happenings],
            "notes": list(facts.notes),
        }


def _is_unexplained(event: Event, registration: TensorRegistration) -> bool:
    """Return whether neither a load nor an optimizer made this change.

    A forward may update buffers and running statistics, but not trained parameters.
    """
    return event.what == "changed" or (event.what == "forward" and registration.trained)


def _where_noticed(event: Event) -> str:
    return event.detail or (f"noticed at {event.where}" if event.where else "")


def _max_ignoring_nan(left: float, right: float) -> float:
    return right if math.isnan(left) else left if math.isnan(right) else max(left, right)

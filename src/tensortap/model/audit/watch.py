"""The audit of a model: hooks around loads, steps and forwards that log which tensors they change."""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import IO, Any

from rich.text import Text

from tensortap import kernels
from tensortap.capture.modules.tree import Tree
from tensortap.core.interrupts import raise_interrupt
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.loading import Wrap, around_steps, loaders, read_call, state_of
from tensortap.model.audit.loads import LoadOutcome, RunningLoad
from tensortap.model.audit.log import AuditLog
from tensortap.model.audit.optimizer_notes import note_copied_values, note_foreign_tensors, note_stale_copies
from tensortap.model.audit.snapshots import Change, TensorSnapshots
from tensortap.model.audit.undone_loads import UndoneLoad
from tensortap.model.caller import caller
from tensortap.model.optimizer_list import optimizer_list
from tensortap.model.page_width import terminal_width
from tensortap.report.terminal import audit as audit_page
from tensortap.report.terminal.audit import AuditFacts, Event
from tensortap.report.terminal.console import console
from tensortap.report.wording import plural

__all__ = ["Audit", "TensorTimeline"]

_ACTOR_OF_EVENT = {"stepped": "optimizer", "forward": "forward", "changed": "something else"}
"""Event → the actor to report if the event undid a load."""

_MIN_WIDTH = 60
_MOST_LINES, _LONGEST_LINE = 3, 120
"""How much of an error's message a note quotes: torch lists every key, and the table has the keys anyway."""


@dataclass(frozen=True)
class TensorTimeline:
    """The history of one tensor: iterate over its events, or print it."""

    name: str
    events: Sequence[Event]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __str__(self) -> str:
        return _text(audit_page.render_timeline(self.name, self.events, terminal_width(_MIN_WIDTH)))


class Audit:
    """The handle that `tensortap.audit` returns. Use it as a context manager, or call `close()`; print it to report."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        model = network_of(model)
        self._framework = framework_of(model)
        self._optimizers = optimizer_list(optimizer)
        self._steps_of = [0] * len(self._optimizers)
        self._model: Any = model
        self._log = AuditLog()
        self._snapshots = TensorSnapshots(self._framework, model)
        self._steps = 0
        self._forwards = 0
        self._loaded = False
        self._loads: list[RunningLoad] = []
        self._closing_notes: list[str] | None = None
        root = Tree(self._framework, model).sites[0]
        self._title = root.cls
        where = caller()
        for name in self._snapshots.names:
            self._log.add(name, Event("initialised", 0, where))
            self._log.undone_loads.set_initial(name, self._snapshots.summary(name))
        with ExitStack() as undo:  # a failure removes the hooks placed so far
            self._wrap_loading(model, undo)
            before, after = (
                partial(self._run_safely, self._before_forward),
                partial(self._run_safely, self._after_forward),
            )
            undo.callback(self._framework.on_call(root.module, before, after))
            for number, each in enumerate(self._optimizers):
                entered = partial(self._run_safely, self._before_step)
                left = partial(self._run_safely, self._after_step, number)
                undo.callback(around_steps(self._framework, each, entered, left))
            self._undo = undo.pop_all()

    # --- public interface --------------------------------------------------------------------------------------
    def check(self) -> list[str]:
        """Compare every element of every tensor now; return the names of tensors that something else changed."""
        return self._find_other_changes(caller(), full=True) if self._model is not None else []

    def close(self) -> None:
        """Compare all tensors a last time and remove all hooks. The report stays available. Idempotent."""
        if self._model is None:
            return
        try:
            self._run_safely(self._find_other_changes, "the end", True)
            self._closing_notes = self._notes()
        finally:
            self._undo.close()
            kernels.release()
            self._model, self._optimizers = None, []
            self._snapshots.release()

    def report(self, file: IO[str] | None = None) -> None:
        """Print the report, in colour on a terminal."""
        screen = console(file or sys.stdout)
        for line in audit_page.render(self.facts(), terminal_width(_MIN_WIDTH)):
            screen.print(line, soft_wrap=True)

    def timeline(self, name: str) -> TensorTimeline:
        """Return the events of one parameter or buffer, in order."""
        if name not in self._log.events:
            close = difflib.get_close_matches(name, self._log.events, n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise UsageError(f"the model has no parameter or buffer {name!r}{hint}")
        return TensorTimeline(name, tuple(self._log.events[name]))

    def status(self, name: str) -> str:
        """Return loaded, identical, undone, overwritten, missing, mismatch, set, trained or untouched."""
        self.timeline(name)
        return self._log.status(name, self._snapshots.registrations[name])[0]

    def facts(self) -> AuditFacts:
        """Return the content of the report as plain data."""
        notes = self._notes() if self._closing_notes is None else self._closing_notes
        return self._log.facts(self._title, self._snapshots.registrations, self._steps, notes)

    def as_dict(self) -> dict[str, Any]:
        """Return the whole log, ready for json.dumps."""
        return self._log.as_dict(self.facts(), self._snapshots.registrations)

    def __str__(self) -> str:
        return _text(audit_page.render(self.facts(), terminal_width(_MIN_WIDTH)))

    def __enter__(self) -> Audit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- loads -------------------------------------------------------------------------------------------------
    def _wrap_loading(self, model: Any, undo: ExitStack) -> None:
        names = {id(m): s.name for s in Tree(self._framework, model).sites for m in (s.module, s.owner)}
        pending, seen = [model], set()
        while pending:
            module = pending.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            pending += [child for _, child in self._framework.children(module)]
            target = names.get(id(module), "")
            for method in loaders(self._framework):
                try:
                    undo.callback(Wrap(module, method, partial(self._load, module, target, method)).remove)
                except Exception:  # noqa: PERF203  # a scripted module, for example, accepts no attributes
                    self._log.note(f"loads straight into {display_name(target)} are not seen")

    def _load(
        self, module: Any, target: str, method: str, inner: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        depth = len(self._loads)
        self._run_safely(self._begin_load, module, target, method, args, kwargs)
        try:
            result = inner(*args, **kwargs)
        except BaseException as error:
            self._run_safely(self._end_load, depth, None, error)
            raise
        self._run_safely(self._end_load, depth, result, None)
        return result

    def _begin_load(
        self, module: Any, target: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        where = caller()
        if not self._loads:
            self._find_other_changes(where, full=True)
        call = read_call(self._framework, args, kwargs)
        state = state_of(self._framework, module, call.by_tensor_name)
        self._loads.append(RunningLoad.begin(self._snapshots, target, method, where, call, state))

    def _end_load(self, depth: int, result: Any, error: BaseException | None) -> None:
        if len(self._loads) != depth + 1:  # the start of this load failed, and a note says so
            return
        load = self._loads.pop()
        changed = self._snapshots.update(full=True)
        if self._loads:
            self._loads[-1].reported |= {*load.keys.values(), *changed, *load.reported}
            self._loads[-1].delegated |= load.call.given.items()
        if load.only_delegates and not changed and error is None:
            return
        results = {}
        for name, what, detail in load.results(changed, self._snapshots.shape, result, error):
            self._add(name, what, load.where, changed.get(name), detail)
            results[name] = (what, detail)
            if what == "loaded":
                now = self._snapshots.summary(name)
                self._log.undone_loads.set_loaded(name, load.before.get(name), now, load.where)
        unexpected = load.unexpected_keys(self._snapshots.shape, result) if load.took_place(changed, error) else ()
        self._log.loads.append(LoadOutcome(load.where, load.target, load.keys, results, unexpected))
        self._log_load(load, changed, error)

    def _log_load(self, load: RunningLoad, changed: dict[str, Change], error: BaseException | None) -> None:
        if not self._loaded and self._log.loads[-1].loaded:
            self._loaded = True
            times = "a forward" if self._forwards == 1 else f"{self._forwards} forwards"
            if self._forwards:
                self._log.note(f"{times} had run on the initial values before the first load, at {load.where}")
        what = f"{load.method}({load.call.options})" + (f" of {load.target}" if load.target else "")
        if error is not None:
            what += f" raised {type(error).__name__}"
            first = " ".join(_head(line) for line in str(error).splitlines()[:_MOST_LINES])
            copied = f"; {plural(len(changed), 'tensor')} had been copied by then" if changed else ""
            self._log.note(f"{load.method} at {load.where} raised {type(error).__name__}: {first}{copied}")
        self._log.add_model_event(what, load.where, self._steps, changed.values(), once=True)
        now = {name: id(tensor) for name, _, tensor in self._snapshots.tensors()}
        for group in load.ties:
            if len({now.get(name) for name in group}) > 1:
                self._log.note(f"{' and '.join(group)} were one tensor before {load.method} at {load.where}, now not")

    # --- forwards and steps ------------------------------------------------------------------------------------
    def _before_forward(self, *_: Any) -> None:
        if not self._loads and not self._framework.recomputing():
            self._find_other_changes(caller(), full=False)
            self._forwards += 1

    def _after_forward(self, *_: Any) -> None:
        if not self._loads and not self._framework.recomputing():
            self._log_changes("forward", "a forward", self._snapshots.update(full=False))

    def _before_step(self) -> None:
        self._find_other_changes(caller(), full=False)

    def _after_step(self, number: int) -> None:
        changed = self._snapshots.update(full=True)
        self._steps_of[number] += 1
        self._steps = max(self._steps_of) - 1  # several optimizers that step in turn share a step
        optimizer = self._optimizers[number]
        words = "optimizer step" if len(self._optimizers) == 1 else f"step of {type(optimizer).__name__}"
        self._log_changes("stepped", words, changed, always=True, optimizer=optimizer)
        self._steps += 1

    def _find_other_changes(self, where: str, full: bool) -> list[str]:
        changed = self._snapshots.update(full)
        self._log_changes("changed", "changed by something else", changed, where)
        return list(changed)

    # --- the log -----------------------------------------------------------------------------------------------
    def _log_changes(
        self,
        what: str,
        words: str,
        changed: dict[str, Change],
        where: str | None = None,
        always: bool = False,
        optimizer: Any = None,
    ) -> None:
        if not changed and not always:
            return
        where = caller() if where is None else where
        undone = self._find_undone_loads(what, changed, where, optimizer)
        for name, change in changed.items():
            self._add(name, what, where, change, undone=undone.get(name))
        if undone:
            words += f", undid {plural(len(undone), 'load')}"
        self._log.add_model_event(words, where, self._steps, changed.values(), once=bool(undone))

    def _find_undone_loads(
        self, what: str, changed: dict[str, Change], where: str, optimizer: Any
    ) -> dict[str, UndoneLoad]:
        """Return the loads that this event undid, and note the cause if it is an optimizer: `optimizer` has stepped."""
        detector, by = self._log.undone_loads, _ACTOR_OF_EVENT[what]
        now = {name: self._snapshots.summary(name) for name, change in changed.items() if not change.created}
        undone = detector.detect(now, by, self._steps, where)
        if by == "something else" and not self._steps:
            for name in now.keys() - undone.keys():
                detector.set_by_user(name, now[name], where)
        if undone and optimizer is not None:
            self._log.note(note_stale_copies(optimizer))
        elif undone:
            values = [self._snapshots.summary(name) for name in undone]
            for each in self._optimizers:
                self._log.note(note_copied_values(self._framework, each, self._tensor_ids(), values))
        return undone

    def _add(
        self,
        name: str,
        what: str,
        where: str,
        change: Change | None,
        detail: str = "",
        undone: UndoneLoad | None = None,
    ) -> None:
        if change is not None and change.created and what != "loaded":
            what = "initialised"  # a lazy or meta tensor got its elements, or the tensor is new in the model
            self._log.undone_loads.set_initial(name, self._snapshots.summary(name))
        if change is None:
            self._log.add(name, Event(what, self._steps, where, detail=detail))
            return
        back = "" if undone is None else f"back at its {undone.values}"
        detail = "; ".join(filter(None, (detail, change.detail, back)))
        self._log.add(
            name,
            Event(what, self._steps, where, True, change.rel_l2, detail, l2=change.l2, undone=undone is not None),
        )

    def _notes(self) -> list[str]:
        if self._optimizers:
            stepped = any(event.what == "stepped" for history in self._log.events.values() for event in history)
            ids = self._tensor_ids()
            notes = [note_foreign_tensors(self._framework, each, ids, stepped) for each in self._optimizers]
            return [note for note in notes if note]
        if self._forwards and any(h.what.startswith("changed") for h in self._log.model_events):
            return ["no optimizer was given: its steps show as changes by something else"]
        return []

    def _tensor_ids(self) -> set[int]:
        return {id(tensor) for _, _, tensor in self._snapshots.tensors()}

    def _run_safely(self, action: Callable[..., Any], *args: Any) -> None:
        """Run a hook's work. An error becomes a note, because an audit must not stop the training."""
        try:
            action(*args)
        except Exception as error:
            raise_interrupt(error)
            self._log.note(f"the audit missed something at {caller()}: {type(error).__name__}: {error}")


def _head(line: str) -> str:
    return textwrap.shorten(line, _LONGEST_LINE, placeholder=" …")


def _text(lines: Sequence[Text]) -> str:
    return "\n".join(line.plain for line in lines)

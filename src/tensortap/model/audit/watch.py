"""What an audit puts beside a model: it stands around loads, steps and forwards, and looks at what they changed."""

from __future__ import annotations

import difflib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import IO, Any

from rich.text import Text

from tensortap import kernels
from tensortap.capture.tree import Tree
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.loading import Wrap, around_steps, loaders, read_call, state_of
from tensortap.model.audit.book import AuditBook
from tensortap.model.audit.ledger import Change, Ledger
from tensortap.model.audit.load import Load
from tensortap.model.audit.optimizer import copied_from_optimizer, why_undone, without_model
from tensortap.model.audit.outcome import LoadOutcome
from tensortap.model.audit.undo import Undone
from tensortap.model.caller import caller
from tensortap.report.terminal import audit as audit_page
from tensortap.report.terminal.audit import AuditFacts, Event
from tensortap.report.terminal.console import console
from tensortap.report.wording import plural

__all__ = ["Audit", "Timeline"]

_ACTORS = {"stepped": "optimizer", "forward": "forward", "changed": "something else"}
"""Event → who undid a load, if one was undone by it."""


@dataclass(frozen=True)
class Timeline:
    """The life of one tensor: iterate over its events, or print it."""

    name: str
    events: Sequence[Event]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __str__(self) -> str:
        return _text(audit_page.render_timeline(self.name, self.events, _width()))


class Audit:
    """What `tensortap.audit` returns: a context manager, or call `close()`. `print(audit)` is the report."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        model = network_of(model)
        self._framework = framework_of(model)
        self._optimizer = optimizer
        self._model: Any = model
        self._book = AuditBook()
        self._ledger = Ledger(self._framework, model)
        self._steps = 0
        self._forwards = 0
        self._loaded = False
        self._loads: list[Load] = []
        self._closing_notes: list[str] | None = None
        root = Tree(self._framework, model).sites[0]
        self._title = root.cls
        where = caller()
        for name in self._ledger.names:
            self._book.add(name, Event("initialised", 0, where))
            self._book.undo.begin(name, self._ledger.summary(name))
        with ExitStack() as undo:  # a failure half-way takes back what was placed
            self._wrap_loading(model, undo)
            before, after = partial(self._safely, self._before_forward), partial(self._safely, self._after_forward)
            undo.callback(self._framework.on_call(root.module, before, after))
            if optimizer is not None:
                steps = (partial(self._safely, self._before_step), partial(self._safely, self._after_step))
                undo.callback(around_steps(self._framework, optimizer, *steps))
            self._undo = undo.pop_all()

    # --- the public face ---------------------------------------------------------------------------------------
    def check(self) -> list[str]:
        """Look at every element of every tensor now; the names of those that something else has changed."""
        return self._changed_by_something_else(caller(), thorough=True) if self._model is not None else []

    def close(self) -> None:
        """A last look, and everything comes off. The report stays. Calling it twice does no harm."""
        if self._model is None:
            return
        try:
            self._safely(self._changed_by_something_else, "the end", True)
            self._closing_notes = self._notes()
        finally:
            self._undo.close()
            kernels.release()
            self._model = self._optimizer = None
            self._ledger.forget()

    def report(self, file: IO[str] | None = None) -> None:
        """Print the report, in colour where there is a terminal."""
        screen = console(file or sys.stdout)
        for line in audit_page.render(self.facts(), _width()):
            screen.print(line, soft_wrap=True)

    def timeline(self, name: str) -> Timeline:
        """What happened to one parameter or buffer, in order."""
        if name not in self._book.events:
            close = difflib.get_close_matches(name, self._book.events, n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise UsageError(f"the model has no parameter or buffer {name!r}{hint}")
        return Timeline(name, tuple(self._book.events[name]))

    def status(self, name: str) -> str:
        """One of loaded, identical, undone, overwritten, missing, mismatch, set, trained, untouched."""
        self.timeline(name)
        return self._book.status(name, self._ledger.registrations[name])[0]

    def facts(self) -> AuditFacts:
        """What the report says, as plain data."""
        notes = self._notes() if self._closing_notes is None else self._closing_notes
        return self._book.facts(self._title, self._ledger.registrations, self._steps, notes)

    def as_dict(self) -> dict[str, Any]:
        """Everything that is known, ready for json.dumps."""
        return self._book.as_dict(self.facts(), self._ledger.registrations)

    def __str__(self) -> str:
        return _text(audit_page.render(self.facts(), _width()))

    def __enter__(self) -> Audit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- loads -------------------------------------------------------------------------------------------------
    def _wrap_loading(self, model: Any, undo: ExitStack) -> None:
        names = {id(m): s.name for s in Tree(self._framework, model).sites for m in (s.module, s.owner)}
        waiting, seen = [model], set()
        while waiting:
            module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            waiting += [child for _, child in self._framework.children(module)]
            target = names.get(id(module), "")
            for method in loaders(self._framework):
                try:
                    undo.callback(Wrap(module, method, partial(self._load, module, target, method)).remove)
                except Exception:  # noqa: PERF203  # a module that takes no attributes, such as a scripted one
                    self._book.note(f"loads straight into {display_name(target)} are not seen")

    def _load(
        self, module: Any, target: str, method: str, inner: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        depth = len(self._loads)
        self._safely(self._begin_load, module, target, method, args, kwargs)
        try:
            result = inner(*args, **kwargs)
        except BaseException as error:
            self._safely(self._end_load, depth, None, error)
            raise
        self._safely(self._end_load, depth, result, None)
        return result

    def _begin_load(
        self, module: Any, target: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        where = caller()
        if not self._loads:
            self._changed_by_something_else(where, thorough=True)
        call = read_call(self._framework, args, kwargs)
        state = state_of(self._framework, module, call.by_tensor_name)
        self._loads.append(Load.begun(self._ledger, target, method, where, call, state))

    def _end_load(self, depth: int, result: Any, error: BaseException | None) -> None:
        if len(self._loads) != depth + 1:  # its beginning was missed, and that was noted
            return
        load = self._loads.pop()
        changed = self._ledger.look(thorough=True)
        told = {}
        for name, what, detail in load.told(changed, self._ledger.shape, result, error):
            self._add(name, what, load.where, changed.get(name), detail)
            told[name] = (what, detail)
            if what == "loaded":
                self._book.undo.gave(name, load.before.get(name), self._ledger.summary(name), load.where)
        unexpected = load.unexpected(self._ledger.shape, result) if load.took_place(changed, error) else ()
        self._book.loads.append(LoadOutcome(load.where, load.target, load.keys, told, unexpected))
        self._happened_load(load, changed, error)
        if self._loads:
            self._loads[-1].handled |= {*load.keys.values(), *changed, *load.handled}

    def _happened_load(self, load: Load, changed: dict[str, Change], error: BaseException | None) -> None:
        if not self._loaded and self._book.loads[-1].gave:
            self._loaded = True
            times = "a forward" if self._forwards == 1 else f"{self._forwards} forwards"
            if self._forwards:
                self._book.note(f"{times} had run on the initial values before the first load, at {load.where}")
        what = f"{load.method}({load.call.options})" + (f" of {load.target}" if load.target else "")
        if error is not None:
            what += f" raised {type(error).__name__}"
            first = " ".join(line.strip() for line in str(error).splitlines()[:2])
            copied = f"; {plural(len(changed), 'tensor')} had been copied by then" if changed else ""
            self._book.note(f"{load.method} at {load.where} raised {type(error).__name__}: {first}{copied}")
        self._book.happened(what, load.where, self._steps, changed.values(), once=True)
        now = {name: id(tensor) for name, _, tensor in self._ledger.tensors()}
        for group in load.ties:
            if len({now.get(name) for name in group}) > 1:
                self._book.note(f"{' and '.join(group)} were one tensor before {load.method} at {load.where}, now not")

    # --- forwards and steps ------------------------------------------------------------------------------------
    def _before_forward(self, *_: Any) -> None:
        if not self._loads and not self._framework.replaying():
            self._changed_by_something_else(caller(), thorough=False)
            self._forwards += 1

    def _after_forward(self, *_: Any) -> None:
        if not self._loads and not self._framework.replaying():
            self._spread("forward", "a forward", self._ledger.look(thorough=False))

    def _before_step(self) -> None:
        self._changed_by_something_else(caller(), thorough=False)

    def _after_step(self) -> None:
        changed = self._ledger.look(thorough=True)
        self._spread("stepped", "optimizer step", changed, always=True)
        self._steps += 1

    def _changed_by_something_else(self, where: str, thorough: bool) -> list[str]:
        changed = self._ledger.look(thorough)
        self._spread("changed", "changed by something else", changed, where)
        return list(changed)

    # --- the book ----------------------------------------------------------------------------------------------
    def _spread(
        self, what: str, words: str, changed: dict[str, Change], where: str | None = None, always: bool = False
    ) -> None:
        if not changed and not always:
            return
        where = caller() if where is None else where
        undone = self._undone(what, changed, where)
        for name, change in changed.items():
            self._add(name, what, where, change, undone=undone.get(name))
        if undone:
            words += f", undid {plural(len(undone), 'load')}"
        self._book.happened(words, where, self._steps, changed.values(), once=bool(undone))

    def _undone(self, what: str, changed: dict[str, Change], where: str) -> dict[str, Undone]:
        """Find the loads that this event has undone, before it is written down."""
        undo, by = self._book.undo, _ACTORS[what]
        now = {name: self._ledger.summary(name) for name, change in changed.items() if not change.made}
        undone = undo.changed(now, by, self._steps, where)
        if by == "something else" and not self._steps:
            for name in now.keys() - undone.keys():
                undo.set(name, now[name], where)
        if undone and self._optimizer is not None:
            values = (self._ledger.summary(name) for name in undone)
            self._book.note(
                why_undone(self._optimizer)
                if by == "optimizer"
                else copied_from_optimizer(self._framework, self._optimizer, self._ids(), values)
            )
        return undone

    def _add(
        self,
        name: str,
        what: str,
        where: str,
        change: Change | None,
        detail: str = "",
        undone: Undone | None = None,
    ) -> None:
        if change is not None and change.made and what != "loaded":
            what = "initialised"  # a lazy or a meta tensor got its elements, or it is new in the model
            self._book.undo.begin(name, self._ledger.summary(name))
        if change is None:
            self._book.add(name, Event(what, self._steps, where, detail=detail))
            return
        back = "" if undone is None else f"back at its {undone.values}"
        detail = "; ".join(filter(None, (detail, change.detail, back)))
        self._book.add(
            name,
            Event(what, self._steps, where, True, change.rel_l2, detail, l2=change.l2, undone=undone is not None),
        )

    def _notes(self) -> list[str]:
        if self._optimizer is not None:
            moved = any(event.what == "stepped" for life in self._book.events.values() for event in life)
            note = without_model(self._framework, self._optimizer, self._ids(), moved)
            return [note] if note else []
        if self._forwards and any(h.what.startswith("changed") for h in self._book.happenings):
            return ["no optimizer was given: its steps show as changes by something else"]
        return []

    def _ids(self) -> set[int]:
        return {id(tensor) for _, _, tensor in self._ledger.tensors()}

    def _safely(self, action: Callable[..., Any], *args: Any) -> None:
        """An audit that fails must not take the training with it."""
        try:
            action(*args)
        except Exception as error:
            self._book.note(f"the audit missed something at {caller()}: {type(error).__name__}: {error}")


def _width() -> int:
    return max(60, shutil.get_terminal_size((80, 24)).columns)


def _text(lines: Sequence[Text]) -> str:
    return "\n".join(line.plain for line in lines)

"""Watches a step by the plan of the step before.

A training step repeats itself: the same calls in the same order, with the same structure of arguments, and gradients in
the same order. `Watcher` finds out what each of them is, from counters, tables and comparisons. That takes many
times as long as recording. So every step leaves a plan, the list of its events. In the next step an event that is the
next one of the plan needs no finding out: its tensors go to their slots.

The counters stand still meanwhile. At the first event that differs, the events of the plan so far are counted, and the
step goes on as if there had been no plan. What it does becomes the next plan.

An event is followed only if it is what the plan says in all that a record, a remark or a fact depends on: the module,
the structure and the plain values of its arguments and outputs, which of them are its own inputs, whether autograd is
on and reaches them, and whether backward recomputes. Shapes, dtypes and values may differ: they are read every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensortap.capture.clock import ModuleCall
from tensortap.capture.flatten import Opened
from tensortap.capture.slots import RecordSlot
from tensortap.capture.templates import Template, one_value
from tensortap.capture.tree import Site, Tree
from tensortap.capture.watcher import Watcher, Wrappers
from tensortap.frameworks.base import GradientCallback
from tensortap.frameworks.capabilities import Edge

__all__ = ["PlannedWatcher"]

_LONGEST = 100_000
"""Events of the longest plan: a step that never ends must not grow for ever."""


@dataclass(slots=True, eq=False)
class _PlannedCall:
    """A call of the step before. It is the event of its beginning; `end` is the one of its end."""

    site: Site
    call: ModuleCall
    watched: bool
    recomputing: bool
    outermost: bool
    inputs: Template
    input_slots: Sequence[RecordSlot]
    reached_inputs: Sequence[bool]
    end: _PlannedEnd = field(init=False)

    def __post_init__(self) -> None:
        self.end = _PlannedEnd()


@dataclass(slots=True, eq=False)
class _PlannedEnd:
    outputs: Template | None = None
    output_slots: Sequence[RecordSlot] = ()
    reached_outputs: Sequence[bool] = field(default_factory=list)
    unchanged: Sequence[bool] = ()
    """Which outputs are inputs of the call, unchanged."""
    callbacks: Sequence[GradientCallback] = ()


class _NoGradient(NamedTuple):
    """The event of a gradient that is None."""

    slot: RecordSlot


class _OpenCall(NamedTuple):
    """A call in progress, and what `Watcher` keeps of it meanwhile."""

    planned: _PlannedCall
    inputs: Mapping[int, int]
    mark: int
    edges: Sequence[tuple[str, Edge]]


class PlannedWatcher(Watcher):
    """A watcher whose hooks do little in a step that repeats the one before."""

    uses_plans = True
    """Whether plans are followed. Without them every step is watched as the first one is."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._events: Sequence[Any] = ()
        """The plan: calls, their ends, slots of gradients."""
        self._at = 0
        """The number of events of the plan that have come."""
        self._following = False
        self._open: list[_OpenCall] = []
        """The calls in progress, while a plan is followed."""
        self._log: list[Any] | None = None
        """The events of this step so far; None if they cannot become a plan."""
        self._logged_calls: list[_PlannedCall] = []
        """The calls of the log that are in progress."""
        self._counts: Mapping[str, tuple[int, int, int]] = {}
        """By module, what the plan's events add to the coverage."""
        self._watches_outputs = "grad_output" in self._kinds
        self._watches_inputs = "grad_input" in self._kinds
        self._plain_tensors = self._framework.plain_tensors

    # --- a step ------------------------------------------------------------------------------------------------
    def arm(self) -> None:
        super().arm()
        sampled = self.recomputations is not None and self.recomputations.samples
        self._at = 0
        self._open.clear()
        self._logged_calls.clear()
        by_hooks = self.operators is None and self.inside is None
        self._following = bool(self._events) and self.uses_plans and by_hooks and not sampled
        self._log = None if self._following else []

    def _see_end(self) -> None:
        if self._following and (self._at != len(self._events) or self._open):
            self._leave_plan()
        if self._following:
            for name, counts in self._counts.items():
                self._book.count(name, *counts)
            self._following = False
        elif self.armed:  # only the step right before is a plan: facts are written where they differ from it
            whole = self._log is not None and not self._logged_calls and not self._clock.reentrant
            self._events = self._log if self._log is not None and whole else ()
            self._counts = _counts(self._events)
        self._log = None

    def _drop_step_hooks(self) -> None:
        self._following = False
        super()._drop_step_hooks()

    def follow(self, tree: Tree, chosen: Sequence[Site], fresh: Sequence[Site], wrappers: Wrappers) -> None:
        if self._following:
            self._leave_plan()
        self._events, self._log = (), None
        super().follow(tree, chosen, fresh, wrappers)

    def _leave_plan(self) -> None:
        """Count the events that have come, and go on without the plan."""
        self._following = False
        self._log = list(self._events[: self._at])
        calls: list[tuple[_PlannedCall, ModuleCall]] = []
        for event in self._log:
            if type(event) is _PlannedCall:
                event.call = self._count_call(event)  # the log goes on with the calls of this step
                calls.append((event, event.call))
            elif type(event) is _PlannedEnd:
                planned, call = calls.pop()
                self._clock.leave(planned.site.name)
                if self.detached is not None and planned.watched and event.outputs is not None:
                    self.detached.left(planned.site, call, event.outputs.paths, event.reached_outputs)
            elif type(event) is RecordSlot:
                self._clock.backward_ran = True
                if event.kind != "param_grad":
                    self._clock.backward_micro = event.micro
                self._book.gradient(event.site.name)
        for (_, call), kept in zip(calls, self._open, strict=True):
            call.inputs, call.mark, call.edges = kept.inputs, kept.mark, kept.edges
        self._logged_calls = [planned for planned, _ in calls]
        self._open.clear()

    def _count_call(self, planned: _PlannedCall) -> ModuleCall:
        site, before = planned.site, planned.call
        if before.recomputed:
            call = self._clock.recompute_again(site.name, before.order)
        else:
            call = self._clock.enter(site.name, (), planned.recomputing)
        call.autograd = before.autograd
        if planned.watched and not before.recomputed:
            self._book.called(site.name, call.autograd)
            if self.detached is not None:
                self.detached.entered(site, call, planned.inputs.paths, planned.reached_inputs)
        return call

    # --- calls -------------------------------------------------------------------------------------------------
    def _begin_call(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._open and self._follow_call(site, args, kwargs):
            return None
        return super()._begin_call(site, args, kwargs)

    def _end_call(self, site: Site, output: Any) -> Any:
        if self._open and self._follow_end(site, output):
            return None
        return super()._end_call(site, output)

    def _before(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not self.armed:
            self._arm_for(site)
        if self._following and self._follow_call(site, args, kwargs):
            return None
        return super()._before(site, args, kwargs)

    def _follow_call(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Record a call that begins, if it is the next event of the plan. Return whether it is."""
        planned = self._events[self._at] if self._at < len(self._events) else None
        framework = self._framework
        if (
            type(planned) is not _PlannedCall
            or planned.site is not site
            or planned.call.autograd is not framework.records_gradients()
            or planned.recomputing is not framework.recomputing()
            or (tensors := planned.inputs.tensors(one_value(args, kwargs, self._plain_tensors), self._plain_tensors))
            is None
            or (self.detached is not None and framework.require_gradients(tensors) != planned.reached_inputs)
        ):
            self._leave_plan()
            return False
        self._at += 1
        inputs: Mapping[int, int] = {}
        mark = 0
        edges: Sequence[tuple[str, Edge]] = ()
        if planned.watched:
            if self._watches_outputs:
                inputs = framework.versions(tensors)
            if self._watches_inputs and planned.call.autograd:
                mark = framework.mark()
                edges = self._edges(site, list(zip(planned.inputs.paths, tensors, strict=True)))
        self._open.append(_OpenCall(planned, inputs, mark, edges))
        call = planned.call
        if call.opens:
            self.forward_begins()
            if self.rows is not None and planned.watched:
                self.rows.entered(call.micro, zip(planned.inputs.paths, tensors, strict=True))
        if planned.watched and not call.recomputed:
            template, last = planned.inputs, self._arguments.get(site.name)
            if (template.plain or last is not None) and (last != template.text or template.arguments is None):
                self._note_arguments(call, Opened([], [], template.plain, template))
        self._record_into(planned.input_slots, tensors)
        return True

    def _follow_end(self, site: Site, output: Any) -> bool:
        """Record a call that ends, if that is the next event of the plan. Return whether it is."""
        planned, inputs, mark, edges = self._open[-1]
        end = planned.end
        tensors: list[Any] | None = []
        if self._at == len(self._events) or self._events[self._at] is not end or planned.site is not site:
            tensors = None
        elif end.outputs is not None:
            tensors = end.outputs.tensors(output, self._plain_tensors)
        if (
            tensors is None
            or (self.detached is not None and self._framework.require_gradients(tensors) != end.reached_outputs)
            or (self._watches_outputs and planned.watched and self._unchanged(inputs, tensors) != end.unchanged)
        ):
            self._leave_plan()
            return False
        self._at += 1
        self._open.pop()
        self._record_into(end.output_slots, tensors)
        on_gradient, hooks = self._framework.on_gradient, self._step_hooks
        for tensor, callback, unchanged in zip(tensors, end.callbacks, end.unchanged, strict=False):
            if not unchanged and (remove := on_gradient(tensor, callback)) is not None:
                hooks.append(remove)
        if edges:
            self._watch_inputs(site, planned.call, edges, tensors, mark)
        if planned.outermost and planned.watched and not self._watches_outputs and planned.call.autograd:
            self._watch_backward(tensors)
        if planned.outermost or site.name == "":
            self._end_forward(site, planned.outermost)
        return True

    def _unchanged(self, inputs: Mapping[int, int], tensors: Sequence[Any]) -> list[bool]:
        if inputs.keys().isdisjoint(map(id, tensors)):
            return [False] * len(tensors)
        version = self._framework.version
        return [(before := inputs.get(id(tensor))) is not None and before == version(tensor) for tensor in tensors]

    def _record_into(self, slots: Sequence[RecordSlot], tensors: Sequence[Any]) -> None:
        take, step = self.take, self._clock.step
        for slot, tensor in zip(slots, tensors, strict=False):  # a recomputation has no slots
            if not take(tensor, slot, step):
                self._record_carefully(tensor, slot, step)

    # --- gradients ---------------------------------------------------------------------------------------------
    def _gradient(self, slot: RecordSlot, gradient: Any | None) -> None:
        if self._following:
            event: Any = slot if gradient is not None else _NoGradient(slot)
            if self._at < len(self._events) and _is_same(self._events[self._at], event):
                self._at += 1
                if gradient is not None and not self.take(gradient, slot, self._clock.step):
                    self._record_carefully(gradient, slot, self._clock.step)
                return
            self._leave_plan()
        self._note(slot if gradient is not None else _NoGradient(slot))
        super()._gradient(slot, gradient)

    def _parameter_gradient(self, site: Site, name: str, gradient: Any | None) -> None:
        if self._following and self.armed:
            slot = self._events[self._at] if self._at < len(self._events) else None
            if (
                gradient is not None
                and type(slot) is RecordSlot
                and slot.site is site
                and slot.path == name
                and slot.kind == "param_grad"
            ):
                self._at += 1
                if not self.take(gradient, slot, self._clock.step):
                    self._record_carefully(gradient, slot, self._clock.step)
                return
            self._leave_plan()
        if gradient is None:
            self._log = None
        elif self.armed:
            self._note(self._slot(self._clock.gradient_micro, "backward", site, 0, "param_grad", name))
        super()._parameter_gradient(site, name, gradient)

    # --- the next plan -----------------------------------------------------------------------------------------
    def _note(self, event: Any) -> None:
        if self._log is not None:
            self._log.append(event)
            if len(self._log) > _LONGEST:
                self._log = None

    def _enter(self, site: Site, opened: Opened) -> ModuleCall:
        outermost, recomputing = self._clock.idle, self._framework.recomputing()
        call = super()._enter(site, opened)
        if self._log is None:
            return call
        if opened.template is None:
            self._log = None
            return call
        watched = site.name in self._sites
        recorded = watched and not call.recomputed and "input" in self._kinds
        planned = _PlannedCall(
            site,
            call,
            watched,
            recomputing,
            outermost,
            opened.template,
            self._slots_of(site, call, "input", opened, "forward") if recorded else (),
            self._reached(opened)[1],
        )
        self._note(planned)
        self._logged_calls.append(planned)
        return call

    def _after(self, site: Site, output: Any) -> Any:
        open_calls = len(self._logged_calls)
        result = super()._after(site, output)
        if open_calls and len(self._logged_calls) == open_calls:  # it was not watched
            planned = self._logged_calls.pop()
            if planned.watched or planned.site is not site:
                self._log = None
            self._note(planned.end)
        return result

    def _leave(self, site: Site, call: ModuleCall, opened: Opened) -> None:
        planned = self._logged_calls.pop() if self._logged_calls else None
        if self._log is not None:
            if planned is None or planned.call is not call or opened.template is None:
                self._log = None
            else:
                self._plan_end(planned, opened)
                self._note(planned.end)
        super()._leave(site, call, opened)

    def _plan_end(self, planned: _PlannedCall, opened: Opened) -> None:
        site, call, end = planned.site, planned.call, planned.end
        tensors = [tensor for _, tensor in opened.tensors]
        end.outputs, end.reached_outputs = opened.template, self._reached(opened)[1]
        if "output" in self._kinds and not call.recomputed:
            end.output_slots = self._slots_of(site, call, "output", opened, "forward")
        if self._watches_outputs:
            end.unchanged = self._unchanged(call.inputs, tensors)
            end.callbacks = self._callbacks_of(site, call, opened)


def _is_same(planned: Any, event: Any) -> bool:
    return planned is event or (type(planned) is _NoGradient and planned == event)


def _counts(events: Sequence[Any]) -> Mapping[str, tuple[int, int, int]]:
    """Return calls, calls without autograd, and gradients of each module."""
    calls: Counter[str] = Counter()
    without: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    for event in events:
        if type(event) is _PlannedCall and event.watched and not event.call.recomputed:
            calls[event.site.name] += 1
            without[event.site.name] += not event.call.autograd
        elif type(event) is RecordSlot:
            gradients[event.site.name] += 1
    return {name: (calls[name], without[name], gradients[name]) for name in {**calls, **gradients}}

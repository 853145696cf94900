"""Watches a step by the plan of the step before.

A training step repeats itself: the same calls in the same order, with the same structure of arguments, and gradients in
the same order. `Watcher` identifies each of them by counters, tables and comparisons, which takes many times as long as
recording. Therefore every step leaves a plan, the list of its events. In the next step, an event that is the next one
of the plan needs no identification: its tensors go to their slots.

The counters stand still meanwhile. At the first event that differs, the events of the plan so far are counted, and the
step goes on as if there had been no plan. Its events become the next plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from tensortap.capture import native_classes
from tensortap.capture.modules.tree import Site, Tree
from tensortap.capture.recording.slots import RecordSlot
from tensortap.capture.watching.clock import ModuleCall
from tensortap.capture.watching.flatten import Opened
from tensortap.capture.watching.follower import NoGradient, PlannedCall, PlannedEnd, new_follower
from tensortap.capture.watching.gradient_watcher import Guard
from tensortap.capture.watching.watcher import Watcher, Wrappers
from tensortap.frameworks.base import AfterCall, BeforeCall, GradientCallback
from tensortap.frameworks.capabilities import Edge

__all__ = ["PlannedWatcher"]

_LONGEST = 100_000
"""Events of the longest plan: a step that never ends must not grow for ever."""


class PlannedWatcher(Watcher):
    """A watcher whose hooks do little in a step that repeats the one before."""

    uses_plans = True
    """Whether plans are followed. Without them every step is watched as the first one is."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._follower = new_follower(self._framework, self, self._kinds, self._arguments)
        self._log: list[Any] | None = None
        """The events of this step so far; None if they cannot become a plan."""
        self._logged_calls: list[PlannedCall] = []
        """The calls of the log that are in progress."""
        self._counts: Mapping[str, tuple[int, int, int]] = {}
        """By module, the counts that the plan's events add to the coverage."""
        self._awaits_access = native_classes.use_access(self._framework)

    def place(self, guard: Guard, undo: ExitStack) -> None:
        self._follower.use(guard)
        super().place(guard, undo)

    # --- a step ------------------------------------------------------------------------------------------------
    def arm(self) -> None:
        super().arm()
        if self._awaits_access:
            self._awaits_access = native_classes.use_access(self._framework)
        sampled = self.recomputations is not None and self.recomputations.samples
        self._logged_calls.clear()
        by_hooks = self.operators is None and self.inside is None
        follower = self._follower
        if follower.events and self.uses_plans and by_hooks and not sampled:
            follower.start(self._clock.step, self.destination.take, self._step_hooks, self.detached is not None)
            self._log = None
        else:
            follower.following = False
            self._log = []

    def _see_end(self) -> None:
        follower = self._follower
        if follower.following and (follower.at != len(follower.events) or follower.open):
            self._leave_plan()
        if follower.following:
            self._book.count_step(self._counts)
            follower.following = False
        elif self.armed:  # only the step right before is a plan: facts are written where they differ from it
            whole = self._log is not None and not self._logged_calls and not self._clock.reentrant
            follower.events = self._log if self._log is not None and whole else []
            self._counts = _counts(follower.events)
        self._log = None

    def _drop_step_hooks(self) -> None:
        self._follower.following = False
        self._follower.forget_open()  # a step that was cut off leaves calls open
        super()._drop_step_hooks()

    def restart(self) -> None:
        super().restart()
        self._follower.events, self._log, self._counts = [], None, {}
        self._logged_calls.clear()

    def follow(self, tree: Tree, chosen: Sequence[Site], fresh: Sequence[Site], wrappers: Wrappers) -> None:
        if self._follower.following:
            self._leave_plan()
        self._follower.events, self._log = [], None
        super().follow(tree, chosen, fresh, wrappers)

    def _leave_plan(self) -> None:
        """Count the events that have come, and go on without the plan."""
        follower = self._follower
        follower.following = False
        self._log = log = follower.events[: follower.at]
        calls: list[tuple[PlannedCall, ModuleCall]] = []
        for event in log:
            if type(event) is PlannedCall:
                event.call = self._count_call(event)  # the log continues with the calls of this step
                calls.append((event, event.call))
            elif type(event) is PlannedEnd:
                planned, call = calls.pop()
                self._clock.leave(planned.site.name)
                if self.detached is not None and planned.watched and event.outputs is not None:
                    self.detached.left(planned.site, call, event.outputs.paths, event.reached_outputs)
            elif type(event) is RecordSlot:
                self._clock.backward_ran = True
                if event.kind != "param_grad":
                    self._clock.backward_micro = event.micro
                self._book.gradient(event.site.name)
        for (_, call), (_, inputs, mark, edges) in zip(calls, follower.open, strict=True):
            call.inputs, call.mark, call.edges = inputs, mark, edges
        self._logged_calls = [planned for planned, _ in calls]
        follower.forget_open()

    def _count_call(self, planned: PlannedCall) -> ModuleCall:
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
    def _call_hooks(self, site: Site) -> tuple[BeforeCall, AfterCall]:
        return self._follower.before(site, self._on_begin), self._follower.after(site, self._on_end)

    def _begin_call(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._follower.open and self._follow_call(site, args, kwargs):
            return None
        return super()._begin_call(site, args, kwargs)

    def _end_call(self, site: Site, output: Any) -> Any:
        if self._follower.open:
            if self._follower.end(site, output):
                return None
            self._leave_plan()
        return super()._end_call(site, output)

    def _before(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not self.armed:
            self._arm_for(site)
        if self._follower.following and self._follow_call(site, args, kwargs):
            return None
        return super()._before(site, args, kwargs)

    def _follow_call(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        follower = self._follower
        if follower.begin(site, args, kwargs):
            return True
        if self._plan_arguments(site, args, kwargs) and follower.begin(site, args, kwargs):
            return True
        self._leave_plan()
        return False

    def _plan_arguments(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Put other plain arguments, such as a new length, into the plan. Return whether nothing else differs."""
        follower = self._follower
        planned = follower.events[follower.at] if follower.at < len(follower.events) else None
        if type(planned) is not PlannedCall or planned.site is not site or site.name not in self._openers:
            return False
        before, opened = planned.inputs, self._openers[site.name][0].arguments(args, kwargs)
        if opened.template in (None, before) or not before.has_tensors_of(opened):
            return False
        planned.inputs = opened.template
        return True

    def begin_planned(self, planned: PlannedCall, tensors: Sequence[Any]) -> None:
        self.destination.forward_begins()
        if self.rows is not None and planned.watched:
            self.rows.entered(planned.call.micro, zip(planned.inputs.paths, tensors, strict=True))

    def edges_of_planned(self, planned: PlannedCall, tensors: Sequence[Any]) -> tuple[int, Sequence[tuple[str, Edge]]]:
        mark = self._framework.mark()
        return mark, self._edges(planned.site, list(zip(planned.inputs.paths, tensors, strict=True)))

    def note_planned_arguments(self, planned: PlannedCall) -> None:
        template = planned.inputs
        self._note_arguments(planned.call, Opened([], [], template=template, arguments=template.arguments))

    def end_planned(
        self, planned: PlannedCall, tensors: Sequence[Any], mark: int, edges: Sequence[tuple[str, Edge]]
    ) -> None:
        site, call = planned.site, planned.call
        if edges:
            self._watch_inputs(site, call, edges, tensors, mark)
        if planned.outermost and planned.watched and "grad_output" not in self._kinds and call.autograd:
            self._watch_backward(tensors)
        if planned.outermost or site.name == "":
            self._end_forward(site, planned.outermost)

    # --- gradients ---------------------------------------------------------------------------------------------
    def _gradient_hook(self, slot: RecordSlot) -> GradientCallback:
        return self._follower.on_gradient(slot, self._on_gradient)

    def _parameter_hook(self, site: Site, name: str) -> GradientCallback:
        return self._follower.on_parameter_gradient(site, name, self._on_parameter_gradient)

    def _gradient(self, slot: RecordSlot, gradient: Any | None) -> None:
        if self._follower.following:
            if self._follower.gradient(slot, gradient):
                return
            self._leave_plan()
        self._note(slot if gradient is not None else NoGradient(slot))
        super()._gradient(slot, gradient)

    def _parameter_gradient(self, site: Site, name: str, gradient: Any | None) -> None:
        if self._follower.following and self.armed:
            if self._follower.parameter_gradient(site, name, gradient):
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
        planned = PlannedCall(
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

    def _plan_end(self, planned: PlannedCall, opened: Opened) -> None:
        site, call, end = planned.site, planned.call, planned.end
        tensors = [tensor for _, tensor in opened.tensors]
        end.outputs, end.reached_outputs = opened.template, self._reached(opened)[1]
        if "output" in self._kinds and not call.recomputed:
            end.output_slots = self._slots_of(site, call, "output", opened, "forward")
        if "grad_output" in self._kinds:
            end.unchanged = self._follower.unchanged(call.inputs, tensors)
            end.callbacks = self._callbacks_of(site, call, opened)


def _counts(events: Sequence[Any]) -> Mapping[str, tuple[int, int, int]]:
    """Return calls, calls without autograd, and gradients of each module."""
    calls: Counter[str] = Counter()
    without: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    for event in events:
        if type(event) is PlannedCall and event.watched and not event.call.recomputed:
            calls[event.site.name] += 1
            without[event.site.name] += not event.call.autograd
        elif type(event) is RecordSlot:
            gradients[event.site.name] += 1
    return {name: (calls[name], without[name], gradients[name]) for name in {**calls, **gradients}}

"""Follows the plan of a step: the tensors of an event that was planned go to their slots.

An event is followed only if it agrees with the plan in everything that a record, a remark or a fact depends on. The
module must be the same, and the structure and plain values of its arguments and outputs. So must be the outputs that
are its own inputs, whether autograd is on and reaches the tensors, and whether backward recomputes. Shapes, dtypes and
values may differ: they are read every time.

`native/events.h` has the same in C. Both are tested by the same tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from tensortap.capture import native_classes
from tensortap.capture.modules.tree import Site
from tensortap.capture.recording.slots import RecordSlot
from tensortap.capture.watching.clock import ModuleCall
from tensortap.capture.watching.templates import Template, one_value
from tensortap.frameworks.base import Framework, GradientCallback, Remove
from tensortap.frameworks.capabilities import Edge

__all__ = ["Follower", "NoGradient", "PlannedCall", "PlannedEnd", "PlannedWork", "new_follower"]


@dataclass(slots=True, eq=False)
class PlannedCall:
    """A call of the step before. It is the event of its beginning; `end` is the one of its end."""

    site: Site
    call: ModuleCall
    watched: bool
    recomputing: bool
    outermost: bool
    inputs: Template
    input_slots: Sequence[RecordSlot]
    reached_inputs: Sequence[bool]
    end: PlannedEnd = field(init=False)

    def __post_init__(self) -> None:
        self.end = PlannedEnd()


@dataclass(slots=True, eq=False)
class PlannedEnd:
    outputs: Template | None = None
    output_slots: Sequence[RecordSlot] = ()
    reached_outputs: Sequence[bool] = field(default_factory=list)
    unchanged: Sequence[bool] = ()
    """The outputs that are unchanged inputs of the call."""
    callbacks: Sequence[GradientCallback] = ()


class NoGradient(NamedTuple):
    """The event of a gradient that is None."""

    slot: RecordSlot


OpenCall = tuple[PlannedCall, Mapping[int, int], int, Sequence[tuple[str, Edge]]]
"""A call in progress, with the `inputs`, `mark` and `edges` of `ModuleCall`."""


class PlannedWork(Protocol):
    """The methods of a watcher that a follower calls; few of them run at every call."""

    def begin_planned(self, planned: PlannedCall, tensors: Sequence[Any]) -> None:
        """Begin a micro step with a call."""

    def edges_of_planned(self, planned: PlannedCall, tensors: Sequence[Any]) -> tuple[int, Sequence[tuple[str, Edge]]]:
        """Return the mark and the edges of a call whose input gradients are recorded."""

    def note_planned_arguments(self, planned: PlannedCall) -> None:
        """Take note of plain arguments, which differ from those of the module's call before."""

    def end_planned(
        self, planned: PlannedCall, tensors: Sequence[Any], mark: int, edges: Sequence[tuple[str, Edge]]
    ) -> None:
        """Finish a call that is outermost, the root's, or has edges."""

    def record_carefully(self, tensor: Any, slot: RecordSlot, step: int) -> None:
        """Record a tensor that has no quick way."""


class Follower:
    """Follows plans. Its counters stand still in a step that is not followed."""

    def __init__(
        self, framework: Framework, work: PlannedWork, kinds: frozenset[str], arguments: Mapping[str, str]
    ) -> None:
        """`arguments` are those of each module's last call, as text."""
        self._framework = framework
        self._work = work
        self._watches_outputs = "grad_output" in kinds
        self._watches_inputs = "grad_input" in kinds
        self._arguments = arguments
        self._plain_tensors = framework.plain_tensors
        self._take: Callable[[Any, RecordSlot, int], bool] = lambda *_: False
        self._hooks: list[Remove] = []
        self._checks_reach = False
        self._step = 0
        self.events: list[Any] = []
        """The plan: calls, their ends, slots of gradients."""
        self.at = 0
        """The number of events of the plan that have come."""
        self.following = False
        self.open: list[OpenCall] = []
        """The calls in progress, while a plan is followed."""

    def start(
        self, step: int, take: Callable[[Any, RecordSlot, int], bool], hooks: list[Remove], checks_reach: bool
    ) -> None:
        """Follow the plan in a step. `hooks` gets functions that remove hooks; `take` is `Recorder.take`."""
        self._step, self._take, self._hooks, self._checks_reach = step, take, hooks, checks_reach
        self.at = 0
        self.open = []
        self.following = True

    def use(self, guard: Callable[..., Any]) -> None:
        """Set the guard of the hooks."""

    def forget_open(self) -> None:
        """Forget the calls in progress."""
        self.open.clear()

    # --- hooks -------------------------------------------------------------------------------------------------
    def before(self, site: Site, careful: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook for calls of a module that begin. It may follow the plan, or call `careful`."""
        return partial(careful, site)

    def after(self, site: Site, careful: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook for calls of a module that end."""
        return partial(careful, site)

    def on_gradient(self, slot: RecordSlot, careful: Callable[..., Any]) -> GradientCallback:
        """Return a hook for a gradient of an output."""
        return partial(careful, slot)

    def on_parameter_gradient(self, site: Site, name: str, careful: Callable[..., Any]) -> GradientCallback:
        """Return a hook for a parameter's gradient."""
        return partial(careful, site, name)

    # --- events ------------------------------------------------------------------------------------------------
    def begin(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Record a call that begins, if it is the next event of the plan. Return whether it is."""
        planned = self.events[self.at] if self.at < len(self.events) else None
        framework = self._framework
        if (
            type(planned) is not PlannedCall
            or planned.site is not site
            or planned.call.autograd is not framework.records_gradients()
            or planned.recomputing is not framework.recomputing()
            or (tensors := planned.inputs.tensors(one_value(args, kwargs, self._plain_tensors), self._plain_tensors))
            is None
            or (self._checks_reach and framework.require_gradients(tensors) != planned.reached_inputs)
        ):
            return False
        self.at += 1
        call = planned.call
        inputs: Mapping[int, int] = {}
        mark = 0
        edges: Sequence[tuple[str, Edge]] = ()
        if planned.watched:
            if self._watches_outputs:
                inputs = framework.versions(tensors)
            if self._watches_inputs and call.autograd:
                mark, edges = self._work.edges_of_planned(planned, tensors)
        self.open.append((planned, inputs, mark, edges))
        if call.opens:
            self._work.begin_planned(planned, tensors)
        if planned.watched and not call.recomputed:
            template, last = planned.inputs, self._arguments.get(site.name)
            if (template.arguments or last is not None) and last != template.text:
                self._work.note_planned_arguments(planned)
        self._record(planned.input_slots, tensors)
        return True

    def end(self, site: Site, output: Any) -> bool:
        """Record a call that ends, if that is the next event of the plan. Return whether it is."""
        planned, inputs, mark, edges = self.open[-1]
        end = planned.end
        tensors: list[Any] | None = []
        if self.at == len(self.events) or self.events[self.at] is not end or planned.site is not site:
            return False
        if end.outputs is not None:
            tensors = end.outputs.tensors(output, self._plain_tensors)
        if (
            tensors is None
            or (self._checks_reach and self._framework.require_gradients(tensors) != end.reached_outputs)
            or (self._watches_outputs and planned.watched and self.unchanged(inputs, tensors) != end.unchanged)
        ):
            return False
        self.at += 1
        self.open.pop()
        self._record(end.output_slots, tensors)
        on_gradient, hooks = self._framework.on_gradient, self._hooks
        for tensor, callback, unchanged in zip(tensors, end.callbacks, end.unchanged, strict=False):
            if not unchanged and (remove := on_gradient(tensor, callback)) is not None:
                hooks.append(remove)
        if edges or planned.outermost or site.name == "":
            self._work.end_planned(planned, tensors, mark, edges)
        return True

    def gradient(self, slot: RecordSlot, gradient: Any | None) -> bool:
        """Record the gradient of an output, if it is the next event of the plan. Return whether it is."""
        planned = self.events[self.at] if self.at < len(self.events) else None
        if gradient is None:
            if type(planned) is not NoGradient or planned.slot is not slot:
                return False
            self.at += 1
            return True
        if planned is not slot:
            return False
        self.at += 1
        self._record((slot,), (gradient,))
        return True

    def parameter_gradient(self, site: Site, name: str, gradient: Any | None) -> bool:
        """Record a parameter's gradient, if it is the next event of the plan. Return whether it is."""
        slot = self.events[self.at] if self.at < len(self.events) else None
        if (
            gradient is None
            or type(slot) is not RecordSlot
            or slot.site is not site
            or slot.path != name
            or slot.kind != "param_grad"
        ):
            return False
        self.at += 1
        self._record((slot,), (gradient,))
        return True

    def unchanged(self, inputs: Mapping[int, int], tensors: Sequence[Any]) -> list[bool]:
        """Return the tensors that are among the inputs, by id, with the version that they had."""
        if inputs.keys().isdisjoint(map(id, tensors)):
            return [False] * len(tensors)
        version = self._framework.version
        return [(before := inputs.get(id(tensor))) is not None and before == version(tensor) for tensor in tensors]

    def _record(self, slots: Sequence[RecordSlot], tensors: Sequence[Any]) -> None:
        take, step = self._take, self._step
        for slot, tensor in zip(slots, tensors, strict=False):  # a recomputation has no slots
            if not take(tensor, slot, step):
                self._work.record_carefully(tensor, slot, step)


def new_follower(
    framework: Framework, work: PlannedWork, kinds: frozenset[str], arguments: Mapping[str, str]
) -> Follower:
    """Return a follower, the quickest that there is."""
    if not framework.plain_tensors or (native := native_classes.load()) is None:
        return Follower(framework, work, kinds, arguments)
    if (hooks := framework.native_hooks) is not None:
        native.configure_hooks(*hooks)
        if (calls := framework.module_calls) is not None:
            native.configure_calls(*calls)
    if (exchange := framework.tensor_exchange) is not None:
        native.configure_views(exchange, framework.plain_tensors)
    return cast(Follower, native.Follower(framework, work, kinds, arguments))

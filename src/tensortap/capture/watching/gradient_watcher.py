"""Watches the gradients of modules, and records their parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.loop.visible import VisibleValues
from tensortap.capture.modules.own_tensors import OwnTensors
from tensortap.capture.modules.tree import Site
from tensortap.capture.recording.slots import RecordSlot
from tensortap.capture.selection import Keep, Selection
from tensortap.capture.watching.clock import Clock, ModuleCall
from tensortap.capture.watching.destination import Destination
from tensortap.capture.watching.flatten import Opened
from tensortap.capture.watching.gradients.shares import InputGradients, WatchedInput
from tensortap.capture.watching.modes import Modes
from tensortap.frameworks.base import Framework, GradientCallback, Remove
from tensortap.frameworks.capabilities import Edge, GradientGraph

__all__ = ["GradientWatcher", "Guard"]

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class GradientWatcher:
    """The part of a `Watcher` that records gradients, parameters and buffers."""

    def __init__(
        self,
        framework: Framework,
        selection: Selection,
        clock: Clock,
        book: CoverageBook,
        destination: Destination,
    ) -> None:
        self._framework = framework
        self._selection = selection
        self._clock = clock
        self._book = book
        self.destination = destination
        self._kinds = frozenset(selection.kinds)
        self._chosen_sites: list[Site] = []
        self._sites: dict[str, Site] = {}
        self._keep: dict[str, Keep] = {}
        self._own = OwnTensors(framework, book)
        self.modes: Modes | None = None
        """Decides which calls belong to training. None takes every call for training."""
        self.visible: VisibleValues | None = None
        """Sketches values without positions that a mask hides, in the first step."""
        self._graph = cast(GradientGraph, framework)  # the observer has checked it, if grad_input is recorded
        self._shares = InputGradients(framework, self._graph)
        self._step_hooks: list[Remove] = []
        """Hooks on tensors and graph nodes, which belong to the step."""
        self._pieces: dict[tuple[RecordSlot, int], Any] = {}
        self.armed = False
        """Whether a module has run in this step."""
        self._only_after = selection.params_after_alone
        self._snapshot_of: int | None = None
        """The last step whose parameters were recorded after it."""

    def _use(self, guard: Guard) -> None:
        self._guard = self._shares.guard = guard
        # Guarded once, not for every tensor: the step waits for every object that is made per gradient.
        self._on_gradient = guard(self._gradient)
        self._on_parameter_gradient = guard(self._parameter_gradient)
        self._own.report(self._parameter_hook)
        self._on_backward = guard(self._backward)

    def _set_sites(self, chosen: Sequence[Site]) -> None:
        self._chosen_sites = list(chosen)
        self._sites = {site.name: site for site in chosen}
        self._own.choose(chosen)
        for name in self._sites:
            if name not in self._keep:
                self._keep[name] = self._selection.keep_of(name)

    def _gradient_hook(self, slot: RecordSlot) -> GradientCallback:
        """Return the callback for the gradient of an output."""
        return partial(self._on_gradient, slot)

    def _parameter_hook(self, site: Site, name: str) -> GradientCallback:
        """Return the callback for the gradient of a parameter."""
        return partial(self._on_parameter_gradient, site, name)

    def hold(self, remove: Remove) -> None:
        """Keep a hook until the step ends."""
        self._step_hooks.append(remove)

    def _drop_step_hooks(self) -> None:
        """Remove the hooks of the step: they must not fire in a later one."""
        for remove in self._step_hooks:
            remove()
        self._step_hooks.clear()
        self._pieces.clear()
        self.armed = False

    # --- backward ----------------------------------------------------------------------------------------------
    def _watch_outputs(self, site: Site, call: ModuleCall, opened: Opened) -> None:
        inputs, callbacks = call.inputs, self._callbacks_of(site, call, opened)
        for seen, (path, tensor) in zip(callbacks, opened.tensors, strict=True):
            if path in call.watched_inside:
                continue
            if (before := inputs.get(id(tensor))) is not None and before == self._framework.version(tensor):
                # The gradient of this tensor is the sum over all uses of the input, not this module's.
                self._book.remark(site.name, f"output {path} is its input, unchanged: no gradient of its own")
                self._book.alias(site.name)
                continue
            if (remove := self._framework.on_gradient(tensor, seen)) is not None:
                self._step_hooks.append(remove)

    def _callbacks_of(self, site: Site, call: ModuleCall, opened: Opened) -> Sequence[GradientCallback]:
        """Return the callbacks for the gradients of a call's outputs. The next step's call uses the same ones."""

        def make(paths: Sequence[str]) -> Sequence[GradientCallback]:
            slots = [self._slot(call.micro, "backward", site, call.number, "grad_output", path) for path in paths]
            return [self._gradient_hook(slot) for slot in slots]

        if opened.template is None:
            return make([path for path, _ in opened.tensors])
        return cast(Sequence[GradientCallback], opened.template.of_call((call.micro, call.number), make))

    def _watch_inputs(
        self, site: Site, call: ModuleCall, edges: Sequence[tuple[str, Edge]], outputs: Sequence[Any], mark: int
    ) -> None:
        inputs = []
        for path, edge in edges:
            slot = self._slot(call.micro, "backward", site, call.number, "grad_input", path)
            inputs.append(WatchedInput(edge, partial(self._gradient, slot), partial(self._skip_share, site, path)))
        self._step_hooks += self._shares.watch(inputs, outputs, mark)

    def _watch_backward(self, outputs: Sequence[Any]) -> None:
        """Notice a backward from a call's outputs, because it ends the micro step, where no gradient is recorded."""
        for tensor in outputs:
            if (remove := self._framework.on_gradient(tensor, self._on_backward)) is not None:
                self._step_hooks.append(remove)

    def _backward(self, gradient: Any | None) -> None:
        self._clock.backward_ran = True

    def _edges(self, site: Site, tensors: Sequence[tuple[str, Any]]) -> list[tuple[str, Edge]]:
        found: dict[tuple[int, int], str] = {}
        edges = []
        for path, tensor in tensors:
            if (edge := self._graph.edge(tensor)) is None:
                continue
            first = found.setdefault((id(edge.node), edge.slot), path)
            if first == path:
                edges.append((path, edge))
            else:
                self._book.remark(site.name, f"grad_input {first} is for input {path} too: they are one tensor")
        return edges

    def _skip_share(self, site: Site, path: str, why: str) -> None:
        self._book.remark(site.name, f"grad_input {path} {why}")

    def _gradient(self, slot: RecordSlot, gradient: Any | None) -> None:
        name = slot.site.name
        if gradient is None:
            self._book.remark(name, f"{slot.kind} {slot.path}: no gradient came; the loss may not use this output")
            return
        if self.modes is not None:
            self.modes.gradient_came()
        clock = self._clock
        clock.backward_ran = True
        clock.backward_micro = slot.micro
        self._book.gradient(name)
        if self.visible is not None and name == "" and slot.kind == "grad_output":
            self.visible.seen(name, slot.micro, slot.call, slot.kind, [(slot.path, gradient)])
        if not self.destination.take(gradient, slot, clock.step):
            self.record_carefully(gradient, slot, clock.step)

    def _parameter_gradient(self, site: Site, name: str, gradient: Any | None) -> None:
        if not self.armed:  # it belongs to an earlier step
            return
        if gradient is None:
            self._book.remark(site.name, f"param_grad {name}: no gradient came, though backward reached the parameter")
            return
        if self.modes is not None:
            self.modes.gradient_came()
        self._clock.backward_ran = True
        self._book.gradient(site.name)
        slot = self._slot(self._clock.gradient_micro, "backward", site, 0, "param_grad", name)
        if not self._clock.reentrant or self._clock.calls_of(site.name) < 2:
            self._record(gradient, slot)
            return
        # Each region that used the parameter runs a backward of its own, so its gradient comes in several pieces.
        piece = slot, self._clock.step
        sum_so_far = self._pieces.get(piece)
        total = self._framework.copy(gradient) if sum_so_far is None else self._framework.add(sum_so_far, gradient)
        self._pieces[piece] = total

    def _record_pieces(self) -> None:
        """Record the gradients that came in pieces, after backward."""
        for (slot, step), gradient in self._pieces.items():
            self._record(gradient, slot, step)
        self._pieces.clear()

    # --- state -------------------------------------------------------------------------------------------------
    def arm(self) -> None:
        """Record and hook the parameters at the step's first call, since they may have been replaced."""
        self.armed = True
        self.destination.step_begins()
        self._snapshot(call=0)
        if "param_grad" in self._kinds:
            self._own.hook_all()

    def own_parameters(self) -> Sequence[tuple[Site, str, Any]]:
        """Return the parameters of the chosen modules, a shared one under its first name."""
        return self._own.of("param")

    def record_step_gradient(self, site: Site, name: str, gradient: Any) -> None:
        """Record a gradient as the optimizer sees it."""
        if reason := self._framework.unreadable(gradient):
            self._book.remark(site.name, f"step_grad {name} is not recorded: {reason}")
        else:
            slot = self._slot(0, "state", site, 0, "step_grad", name)
            self.destination.record_gradient(gradient, slot, self._clock.step)

    def _snapshot(self, call: int, only: Collection[str] | None = None) -> None:
        """Record parameters and buffers; `only` names modules that the step has added."""
        known = self._only_after and self._snapshot_of == self._clock.step - 1 and only is None
        if call:
            self._snapshot_of = self._clock.step
        kinds = [kind for kind in ("param", "buffer") if kind in self._kinds]
        if known and not call and "param" in kinds:
            kinds.remove("param")
        if not kinds:
            return
        self.destination.snapshot_begins()
        try:
            for kind in kinds:
                for site, name, tensor in self._own.of(kind):
                    if only is None or site.name in only:
                        self._record(tensor, self._slot(0, "state", site, call, kind, name))
        finally:
            self.destination.snapshot_ended()

    def _slots_of(self, site: Site, call: ModuleCall, kind: str, opened: Opened, phase: str) -> Sequence[RecordSlot]:
        def make(paths: Sequence[str]) -> Sequence[RecordSlot]:
            return [self._slot(call.micro, phase, site, call.number, kind, path) for path in paths]

        if opened.template is None:
            return make([path for path, _ in opened.tensors])
        return cast(Sequence[RecordSlot], opened.template.of_call((phase, call.micro, call.number), make))

    def _slot(self, micro: int, phase: str, site: Site, call: int, kind: str, path: str) -> RecordSlot:
        return self.destination.slots.find(micro, phase, site, call, kind, path, self._keep[site.name])

    def _record(self, tensor: Any, slot: RecordSlot, step: int | None = None) -> None:
        step = self._clock.step if step is None else step
        if not self.destination.take(tensor, slot, step):
            self.record_carefully(tensor, slot, step)

    def record_carefully(self, tensor: Any, slot: RecordSlot, step: int) -> None:
        """Record a tensor that has no quick way."""
        if reason := self._framework.unreadable(tensor):
            self._book.remark(slot.module, f"{slot.kind} {slot.path} is not recorded: {reason}")
            return
        self.destination.record(tensor, slot, step)

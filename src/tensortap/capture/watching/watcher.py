"""Watches the calls and gradients of the chosen modules, and passes every tensor on to be recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.loop.detached import DetachedValues
from tensortap.capture.loop.recomputed import Recomputations
from tensortap.capture.loop.rows import InputRows
from tensortap.capture.modules.mode_remarks import ModeRemarks
from tensortap.capture.modules.tree import Site, Tree
from tensortap.capture.recording.deferred.read_order import AT_ONCE
from tensortap.capture.recording.slots import RecordSlot, by_key
from tensortap.capture.selection import Keep, Selection
from tensortap.capture.watching.clock import Clock, ModuleCall
from tensortap.capture.watching.destination import Destination
from tensortap.capture.watching.flatten import Opened
from tensortap.capture.watching.gradient_watcher import GradientWatcher, Guard
from tensortap.capture.watching.inside import InsideCalls
from tensortap.capture.watching.modes import Modes
from tensortap.capture.watching.module_hooks import HookedModule, ModuleHooks
from tensortap.capture.watching.operators import OperatorRecords
from tensortap.capture.watching.templates import TemplateOpener
from tensortap.core.arguments import written
from tensortap.core.records import Key
from tensortap.frameworks.base import AfterCall, BeforeCall, Framework, Identity

__all__ = ["Watcher", "Wrappers"]

Wrappers = Mapping[int, Sequence[tuple[Any, Callable[[], None]]]]
"""By the id of a module: compiled wrappers outside of the model, each with the callback before its calls."""


class Watcher(GradientWatcher):
    """The hooks of one tap. `guard` wraps each of them: it skips them while nothing is recorded, and catches errors."""

    def __init__(
        self,
        framework: Framework,
        tree: Tree,
        chosen: Collection[str],
        selection: Selection,
        clock: Clock,
        book: CoverageBook,
        record: Callable[[Any, Key, Site, Keep], None],
    ) -> None:
        super().__init__(framework, selection, clock, book, Destination(by_key(record)))
        self._tree = tree
        self._remarks = ModeRemarks(framework, book)
        self.recomputations: Recomputations | None = None
        """Compares recomputations with the calls that they repeat."""
        self.rows: InputRows | None = None
        """Notes which rows a step reads, in any order."""
        self.detached: DetachedValues | None = None
        """Notes which values autograd does not reach, if that is recorded."""
        self.operators: OperatorRecords | None = None
        """Records the operators of some modules, if requested."""
        self._evaluation_clock = Clock()
        """Counts the forwards and calls of an evaluation, if it is recorded."""
        self.inside: InsideCalls | None = None
        """Shows calls inside compiled graphs, if requested."""
        self._arguments: dict[str, str] = {}
        """Plain arguments of each module's last call, as text. A module that never had any is absent."""
        self._module_hooks = ModuleHooks(framework)
        self._wrappers: Wrappers = {}
        self.stale = False
        """Whether the model may have changed since its modules were last listed."""
        self.refresh: Callable[[], None] = lambda: None
        """Lists the modules again; called before an outermost call if `stale`."""
        self.check_model: Callable[[], None] = lambda: None
        """Sets `stale` if the model has changed unnoticed; called after each recorded step."""
        self._seen_step = False
        """Whether the step's first outermost call has ended."""
        self._feeds = False
        """Whether modules receive other tensors than their own."""
        names = frozenset(chosen)
        self._set_sites([site for site in tree.sites if site.name in names])
        self._use(lambda hook: hook)

    def _use(self, guard: Guard) -> None:
        super()._use(guard)
        self._on_begin, self._on_end = guard(self._begin_call), guard(self._end_call)
        if self.operators is not None:
            self.operators.use(guard)

    def place(self, guard: Guard, undo: ExitStack) -> None:
        """Place hooks on the chosen modules, and on the root, whose forwards count the micro steps."""
        self._use(guard)
        undo.callback(self.drop)
        undo.callback(self._module_hooks.remove)
        if self.inside is not None:
            self.inside.use(guard)
            undo.callback(self.inside.close)
        self._place_hooks()

    def _place_hooks(self) -> None:
        hooked = list(self._hooked_modules())
        self._module_hooks.update(hooked)
        if self.inside is None:
            return
        own = {each.name for each in hooked}
        sites = [site for site in self._tree.sites if site.name in self._sites or site.name == ""]
        calls = {site.name: self._call_hooks(site) for site in sites if site.name not in own}
        self.inside.place(sites, hooked, calls)

    def attach(self) -> None:
        """Place the hooks on modules, if they are not there."""
        self._module_hooks.attach()

    def detach(self) -> None:
        """Remove the hooks on modules, except those that must see steps that are not recorded."""
        needs_root = self._wrappers or (self.modes is not None and not self.modes.settled)
        self._module_hooks.detach(with_root=not needs_root)

    def _hooked_modules(self) -> Iterator[HookedModule]:
        for site in self._tree.sites:
            if (site.name not in self._sites or site.inside is not None) and site.name != "":
                continue
            before, after = self._call_hooks(site)
            if site.name == "" and self.modes is not None:
                before = partial(_observed, self.modes, before)
            wrappers = self._wrappers.get(id(site.owner), ())
            if not (site.compiled and wrappers and site.module is site.owner):  # else only its wrappers are called
                yield HookedModule(site.name, site.module, before, after)
            for wrapper, first in wrappers:
                if wrapper is not site.module:
                    yield HookedModule(site.name, wrapper, partial(_through, first, before), after)

    def _call_hooks(self, site: Site) -> tuple[BeforeCall, AfterCall]:
        """Return the callbacks for the beginning and the end of a call of this module."""
        return partial(self._on_begin, site), partial(self._on_end, site)

    def follow(self, tree: Tree, chosen: Sequence[Site], fresh: Sequence[Site], wrappers: Wrappers) -> None:
        """Watch the modules of a model that has changed. `fresh` are those that were not watched before."""
        self._tree, self._wrappers = tree, wrappers
        self._set_sites(chosen)
        self._place_hooks()
        if self.armed:
            self._snapshot(call=0, only=[site.name for site in fresh])
            if "param_grad" in self._kinds:
                self._own.hook_all()

    def follow_wrappers(self, wrappers: Wrappers) -> None:
        """Hook compiled wrappers around modules that are watched."""
        self._wrappers = wrappers
        self._place_hooks()

    def _set_sites(self, chosen: Sequence[Site]) -> None:
        super()._set_sites(chosen)
        self._openers = {
            name: (TemplateOpener(self._framework, arguments=True), TemplateOpener(self._framework, arguments=False))
            for name in ("", *self._sites)
        }
        self._remarks.choose(chosen)

    def end_step(self) -> None:
        """Finish what belongs to the step, and remove its hooks."""
        self._shares.finish()
        self._record_pieces()
        self._see_end()
        if self.detached is not None:
            self.detached.end_step(self._clock.step)
        if self.rows is not None:
            self.rows.end_step(self._clock.step)
        if self.visible is not None and self.armed:
            self.visible.end_step(self._clock.step)
        if self.recomputations is not None:
            self.recomputations.end_step(self._clock.step)
        if self.modes is not None:
            self._book.notice(self.modes.end_step())
        self._evaluation_clock.next_step()
        if self.armed:
            self._book.captured_steps += 1
            self._snapshot(call=1)
            self.check_model()
        self._drop_step_hooks()

    def restart(self) -> None:
        """Forget the step so far. Hooks on modules stay."""
        self.drop()
        self._arguments.clear()
        self._snapshot_of = None
        self._set_sites(self._chosen_sites)  # the data kept for its calls refers to slots of the old recorder

    def _see_end(self) -> None:
        """Called when the last call and the last gradient of a step were seen."""

    def drop(self) -> None:
        """Remove every hook that is not on a module, because the next step is not recorded."""
        try:
            self._drop_step_hooks()
        finally:
            self._own.remove_hooks()

    def _drop_step_hooks(self) -> None:
        if self.operators is not None:
            self.operators.end_step()
        super()._drop_step_hooks()
        if self.inside is not None:
            self.inside.drop()
        self._seen_step = False

    # --- forward -----------------------------------------------------------------------------------------------
    def _begin_call(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.stale and self._clock.idle:
            self.refresh()
        if self.modes is not None and (mode := self.modes.enter(site.name, self._clock.idle)) != "train":
            if mode == "eval" and self.modes.recorded:
                self._begin_evaluation(site, args, kwargs)
            return None
        return self._before(site, args, kwargs)

    def _end_call(self, site: Site, output: Any) -> Any:
        if self.modes is not None and (mode := self.modes.leave(site.name)) != "train":
            if mode == "eval" and self.modes.recorded:
                self._end_evaluation(site, output)
            if site.name == "":
                self._remarks.collect()  # hooks may change how a module runs in eval mode
            return None
        return self._after(site, output)

    # --- inside compiled graphs --------------------------------------------------------------------------------
    def graph_begins(self, autograd: bool) -> tuple[Clock, ModuleCall | None, str]:
        """Begin a run of a compiled graph. Return its clock, the call that it is part of, and its phase.

        The phase is empty if the run is not recorded.
        """
        if self.modes is not None and (mode := self.modes.of_graph(self._clock.idle, autograd)) != "train":
            if mode != "eval" or not self.modes.recorded:
                return self._evaluation_clock, None, ""
            clock = self._evaluation_clock
            if clock.idle:
                clock.enter_graph()
            return clock, clock.innermost, "eval"
        clock = self._clock
        if not self.armed:
            self.arm()
        if clock.idle and clock.enter_graph():
            self._record_pieces()
            self.destination.forward_begins()
        return clock, clock.innermost, "forward"

    def begin_inside(self, site: Site, call: ModuleCall, phase: str) -> None:
        """Begin a call inside a compiled graph, before anything of it is recorded."""
        if site.name not in self._sites:
            return
        if phase == "eval":
            self._book.evaluated(site.name)
        elif not call.recomputed:
            self._book.called(site.name, call.autograd)

    def inputs_inside(self, site: Site, call: ModuleCall, phase: str, opened: Opened) -> None:
        """Record the inputs of a call inside a compiled graph."""
        if site.name in self._sites and phase == "forward":
            self._entered(site, call, opened)
        elif site.name in self._sites and "input" in self._kinds:
            self._record_all(site, call, "input", opened, phase)

    def outputs_inside(self, site: Site, call: ModuleCall, phase: str, opened: Opened) -> None:
        """Record the outputs of a call inside a compiled graph."""
        if site.name in self._sites and phase == "forward":
            self._leave_values(site, call, opened)
        elif site.name in self._sites and "output" in self._kinds:
            self._record_all(site, call, "output", opened, phase)
        if self._clock.idle and phase == "forward":
            self._end_forward(site, idle=True)

    def forget(self, tensor: Any) -> None:
        """Treat a tensor as a new one: compiled code has reused its memory."""
        self.destination.forget(tensor)

    def code_changed(self) -> None:
        """Prepare for other compiled code than before."""
        self.destination.code_changed()

    @property
    def repeats_steps(self) -> bool:
        """Whether a call inside a compiled graph that is like one of an earlier step needs only its records."""
        return self.recomputations is None or not self.recomputations.samples

    def slots_inside(self, site: Site, call: ModuleCall, kind: str, opened: Opened) -> Sequence[RecordSlot] | None:
        """Return the slots of a call's tensors; None if every such call needs more than recording its tensors."""
        if opened.arguments or site.name in self._arguments:
            return None
        if site.name not in self._sites or kind not in self._kinds:
            return ()
        return self._slots_of(site, call, kind, opened, "forward")

    def record_inside(self, slots: Sequence[RecordSlot], tensors: Sequence[Any]) -> None:
        """Record the tensors of a call that is like one of an earlier step."""
        step = self._clock.step
        for slot, tensor in zip(slots, tensors, strict=False):
            if not self.destination.take(tensor, slot, step):
                self.record_carefully(tensor, slot, step)

    def gradient_inside(self, site: Site, call: ModuleCall, kind: str, path: str, gradient: Any) -> None:
        """Record a gradient that compiled code has computed."""
        if site.name in self._sites:
            slot = self._slot(call.micro, "backward", site, call.number, kind, path)
            if self.inside is not None and self.inside.at_once:
                slot.read = AT_ONCE
            self._gradient(slot, gradient)

    # --- evaluation --------------------------------------------------------------------------------------------
    def _begin_evaluation(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the inputs of a call in an evaluation, which leaves the training's own counts alone."""
        self._enter_evaluation(site, self._openers[site.name][0].arguments(args, kwargs))

    def _end_evaluation(self, site: Site, output: Any) -> None:
        self._leave_evaluation(site, self._openers[site.name][1].output(output))

    def _enter_evaluation(self, site: Site, opened: Opened) -> ModuleCall:
        call = self._evaluation_clock.enter(site.name, ())
        if site.name in self._sites:
            self._book.evaluated(site.name)
            if "input" in self._kinds:
                self._record_all(site, call, "input", opened, "eval")
        return call

    def _leave_evaluation(self, site: Site, opened: Opened) -> None:
        call = self._evaluation_clock.leave(site.name)
        if call is not None and site.name in self._sites and "output" in self._kinds:
            self._record_all(site, call, "output", opened, "eval")
        if self._evaluation_clock.idle:
            self.destination.forward_ended()

    def _before(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = self._enter(site, self._openers[site.name][0].arguments(args, kwargs))
        if self.operators is not None:
            self.operators.entered(site, call)

    def _enter(self, site: Site, opened: Opened) -> ModuleCall:
        """Count a call that begins, and record its inputs."""
        framework = self._framework
        if not self.armed:
            self._arm_for(site)
        autograd = framework.records_gradients()
        recomputing = framework.recomputing()
        # A checkpointed region runs again in backward, and its inputs identify it. With reentrant checkpointing it runs
        # without autograd at first. Otherwise the identity only matters if the second run gets substituted tensors.
        started_from: Sequence[Identity] = ()
        if recomputing or not autograd or self._feeds:
            started_from = [i for _, t in opened.tensors if (i := framework.identity(t)) is not None]
        call = (self._clock.enter_recomputation if recomputing else self._clock.enter)(site.name, started_from)
        call.autograd = autograd
        if call.opens:
            self._record_pieces()
            self.destination.forward_begins()
        if site.name not in self._sites:
            return call
        if site.name in self._own.replaced and not call.recomputed:
            for name, parameter in framework.parameters(site.owner):
                self._own.hook(site, name, parameter)
        if "grad_output" in self._kinds:
            call.inputs = framework.versions([tensor for _, tensor in opened.tensors])
        if "grad_input" in self._kinds and autograd:
            call.mark = framework.mark()
            call.edges = self._edges(site, opened.tensors)
        if not call.recomputed:
            self._book.called(site.name, autograd)
        self._entered(site, call, opened)
        return call

    def _entered(self, site: Site, call: ModuleCall, opened: Opened) -> None:
        """Record the inputs of a call that was counted."""
        if self.recomputations is not None:
            self.recomputations.seen(site, call, "input", opened)
        if call.recomputed:
            return
        if opened.arguments is None:  # opened without a template
            opened.arguments = written(opened.plain, self._framework.opaque_value)
        if opened.arguments or site.name in self._arguments:
            self._note_arguments(call, opened)
        if self.detached is not None:
            self.detached.entered(site, call, *self._reached(opened))
        if call.opens and self.rows is not None:
            self.rows.entered(call.micro, opened.tensors)
        if call.opens and self.visible is not None:
            self.visible.begins(call.micro, opened.tensors, site.owner)
        if "input" in self._kinds:
            self._record_all(site, call, "input", opened)

    def _arm_for(self, site: Site) -> None:
        """Begin a step with a call of this module."""
        self.arm()
        if site.name != "":  # a program that calls parts of a model may change their mode before the step ends
            self._remarks.collect()

    def _reached(self, opened: Opened) -> tuple[list[str], list[bool]]:
        """Return the paths of tensors, and whether autograd reaches each."""
        if opened.detached is not None:
            return [*opened.paths], [path not in opened.detached for path in opened.paths]
        flags = self._framework.require_gradients([tensor for _, tensor in opened.tensors])
        return [path for path, _ in opened.tensors], flags

    def _note_arguments(self, call: ModuleCall, opened: Opened) -> None:
        if self.destination.called_with is None:
            return
        template = opened.template
        arguments = opened.arguments or {}
        text = repr(arguments) if template is None else template.text
        if self._arguments.get(call.module) != text:
            self._arguments[call.module] = text
            self.destination.called_with(self._clock.step, call.micro, call.module, call.number, arguments)

    def _after(self, site: Site, output: Any) -> Any:
        call = self._clock.leave(site.name)
        if self.operators is not None:
            self.operators.left(call)
        if call is not None and site.name in self._sites:
            self._leave(site, call, self._openers[site.name][1].output(output))
        self._end_forward(site, self._clock.idle)

    def _end_forward(self, site: Site, idle: bool) -> None:
        """Finish a forward, if the call that has ended was the outermost or the root's."""
        if idle and not self._seen_step:
            self._seen_step = True
            self.destination.step_seen(self._chosen_sites)
        if site.name == "":
            self._remarks.collect()
            self.destination.forward_ended()
        if idle and self._own.uninitialised:  # a lazy module has its parameters, and its final class, by now
            self._own.hook_all()
            self.stale = True

    def _leave(self, site: Site, call: ModuleCall, opened: Opened) -> None:
        """Record the outputs of a call that ends, and watch for their gradients."""
        self._leave_values(site, call, opened)
        if "grad_output" in self._kinds:
            self._watch_outputs(site, call, opened)
        elif self._clock.idle and call.autograd:
            self._watch_backward([tensor for _, tensor in opened.tensors])
        if call.edges:
            self._watch_inputs(site, call, call.edges, [tensor for _, tensor in opened.tensors], call.mark)
        call.inputs, call.edges = {}, ()  # the call is kept for the step, but must not keep the graph alive

    def _leave_values(self, site: Site, call: ModuleCall, opened: Opened) -> None:
        if self.detached is not None:
            self.detached.left(site, call, *self._reached(opened))
        if self.recomputations is not None:
            self.recomputations.seen(site, call, "output", opened)
        if "output" in self._kinds and not call.recomputed:
            self._record_all(site, call, "output", opened)

    def _record_all(self, site: Site, call: ModuleCall, kind: str, opened: Opened, phase: str = "forward") -> None:
        step = self._clock.step
        slots = self._slots_of(site, call, kind, opened, phase)
        if self.inside is not None and opened.detached is not None:
            for slot, in_graph in zip(slots, opened.in_graph, strict=False):
                slot.in_graph = in_graph
                if self.inside.at_once:
                    slot.read = AT_ONCE
        for slot, (_, tensor) in zip(slots, opened.tensors, strict=True):
            if not self.destination.take(tensor, slot, step):
                self.record_carefully(tensor, slot, step)
        if self.visible is not None and phase == "forward":
            self.visible.seen(site.name, call.micro, call.number, kind, opened.tensors)
        for name in opened.closed:
            self._book.remark(site.name, f"{kind} of type {name} is not opened")

    def record_operator(self, site: Site, call: ModuleCall, phase: str, path: str, tensor: Any) -> None:
        """Record the results of an operator of a module, in forward or in backward."""
        self._record(tensor, self._slot(call.micro, phase, site, call.number, "operator", path))

    @property
    def tree(self) -> Tree:
        """All modules, as they were last listed."""
        return self._tree

    @property
    def watched_sites(self) -> Sequence[Site]:
        """The chosen modules."""
        return self._chosen_sites


def _through(first: Callable[[], None], before: BeforeCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Prepare for the call of a compiled wrapper, also in steps that are not recorded."""
    first()
    return before(args, kwargs)


def _observed(modes: Modes, before: BeforeCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Show the root's forwards to the modes, also in steps that are not recorded."""
    with suppress(Exception):  # no guard surrounds it; in a recorded step the same error occurs inside a guard
        modes.observe()
    return before(args, kwargs)

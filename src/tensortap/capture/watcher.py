"""Watches the calls and gradients of the chosen modules, and passes every tensor on to be recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, cast

from tensortap.capture.clock import Clock, ModuleCall
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.evaluation import Evaluation
from tensortap.capture.flatten import Opened, open_arguments, open_value
from tensortap.capture.gradients.shares import InputGradients, WatchedInput
from tensortap.capture.selection import Keep, Selection
from tensortap.capture.tree import Site, Tree
from tensortap.core.arguments import written
from tensortap.core.records import Key, display_name
from tensortap.frameworks.base import BeforeCall, Framework, GradientCallback, Identity, Remove
from tensortap.frameworks.capabilities import Edge, GradientGraph

__all__ = ["Watcher"]

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class Watcher:
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
        self._framework = framework
        self._tree = tree
        self._sites = {site.name: site for site in tree.sites if site.name in chosen}
        self._chosen_sites = list(self._sites.values())
        self._owners = [site.owner for site in self._chosen_sites]
        self._modes: dict[str, Any] = {}
        """Training mode of each module when its remarks were last collected."""
        self._kinds = frozenset(selection.kinds)
        self._keep = {name: selection.keep_of(name) for name in self._sites}
        self._clock = clock
        self._book = book
        self._record_now = record
        self.defer: Callable[[Any, Key, Site, Keep], bool] = lambda *_: False
        """Called first for every tensor; returns whether it is recorded later instead of now."""
        self.forward_begins: Callable[[], None] = lambda: None
        """Called before the root runs, except for a recomputation."""
        self.forward_ended: Callable[[], None] = lambda: None
        """Called after the root has run."""
        self.called_with: Callable[[int, int, str, int, Mapping[str, Any]], None] | None = None
        """Called for every call whose plain arguments differ from those of the call before; see `RunWriter.called`."""
        self.evaluation: Evaluation | None = None
        """Decides which calls belong to an evaluation and are ignored. None records every call."""
        self._arguments: dict[str, str] = {}
        """Plain arguments of each module's last call, as text. A module that never had any is absent."""
        self._graph = cast(GradientGraph, framework)  # the observer has checked it, if grad_input is recorded
        self._shares = InputGradients(framework, self._graph)
        self._step_hooks: list[Remove] = []
        """Hooks on tensors and graph nodes, which belong to the step."""
        self._parameter_hooks: dict[tuple[str, str], Remove] = {}
        """Hooks on parameters, by module and name. Placing them again would delay the start of each step, when the
        device is idle."""
        self._pieces: dict[Key, tuple[Site, Any]] = {}
        self.armed = False
        """Whether a module has run in this step."""
        self._feeds = False
        """Whether modules receive other tensors than their own."""
        self._parameter_callbacks: dict[tuple[str, str], GradientCallback] = {}
        self._use(lambda hook: hook)

    def _use(self, guard: Guard) -> None:
        self._guard = self._shares.guard = guard
        # Guarded once, not for every tensor: the step waits for every object that is made per gradient.
        self._on_gradient = guard(self._gradient)
        self._on_parameter_gradient = guard(self._parameter_gradient)
        self._parameter_callbacks.clear()

    def place(self, guard: Guard, undo: ExitStack) -> None:
        """Place hooks on the chosen modules, and on the root, whose forwards count the micro steps."""
        self._use(guard)
        undo.callback(self.drop)
        for site in self._tree.sites:
            if (site.name in self._sites and site.inside is None) or site.name == "":
                before, after = partial(guard(self._begin_call), site), partial(guard(self._end_call), site)
                if site.name == "" and self.evaluation is not None:
                    before = partial(_observed, self.evaluation, before)
                undo.callback(self._framework.on_call(site.module, before, after))

    def end_step(self) -> None:
        """Finish what belongs to the step, and remove its hooks."""
        self._shares.finish()
        self._record_pieces()
        if self.evaluation is not None:
            self._book.notice(self.evaluation.end_step())
        if self.armed:
            self._book.captured_steps += 1
            self._snapshot(call=1)
        self._drop_step_hooks()

    def drop(self) -> None:
        """Remove every hook that is not on a module, because the next step is not recorded."""
        try:
            self._drop_step_hooks()
        finally:
            for remove in self._parameter_hooks.values():
                remove()
            self._parameter_hooks.clear()

    def _drop_step_hooks(self) -> None:
        """Remove the hooks of the step: they must not fire in a later one."""
        for remove in self._step_hooks:
            remove()
        self._step_hooks.clear()
        self._pieces.clear()
        self.armed = False

    # --- forward -----------------------------------------------------------------------------------------------
    def _begin_call(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.evaluation is not None and self.evaluation.enter(site.name, self._clock.idle):
            return None
        return self._before(site, args, kwargs)

    def _end_call(self, site: Site, output: Any) -> Any:
        if self.evaluation is not None and self.evaluation.leave(site.name):
            if site.name == "":
                self._collect_remarks()  # hooks may change how a module runs in eval mode
            return None
        return self._after(site, output)

    def _before(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._enter(site, open_arguments(args, kwargs, self._framework.is_tensor))

    def _enter(self, site: Site, opened: Opened) -> ModuleCall:
        """Count a call that begins, and record its inputs."""
        framework = self._framework
        if not self.armed:
            self.arm()
            if site.name != "":  # a program that calls parts of a model may change their mode before the step ends
                self._collect_remarks()
        autograd = framework.records_gradients()
        recomputing = framework.recomputing()
        # A checkpointed region runs again in backward, and its inputs identify it. With reentrant checkpointing it runs
        # without autograd at first. Otherwise the identity only matters if the second run gets substituted tensors.
        started_from: Sequence[Identity] = ()
        if recomputing or not autograd or self._feeds:
            started_from = [i for _, t in opened.tensors if (i := framework.identity(t)) is not None]
        call = (self._clock.enter_recomputation if recomputing else self._clock.enter)(site.name, started_from)
        call.autograd = autograd
        if site.name == "" and not recomputing:
            self._record_pieces()
            self.forward_begins()
        if site.name not in self._sites:
            return call
        if "grad_output" in self._kinds:
            call.inputs = {id(tensor): framework.version(tensor) for _, tensor in opened.tensors}
        if "grad_input" in self._kinds and autograd:
            call.mark = framework.mark()
            call.edges = self._edges(site, opened)
        if call.recomputed:
            return call
        self._book.called(site.name, autograd)
        if opened.plain or site.name in self._arguments:
            self._note_arguments(call, opened)
        if "input" in self._kinds:
            self._record_all(site, call, "input", opened)
        return call

    def _note_arguments(self, call: ModuleCall, opened: Opened) -> None:
        if self.called_with is None:
            return
        arguments = written(opened.plain, self._framework.opaque_value)
        text = repr(arguments)  # distinguishes True from 1, and takes half as long as JSON
        if self._arguments.get(call.module) != text:
            self._arguments[call.module] = text
            self.called_with(self._clock.step, call.micro, call.module, call.number, arguments)

    def _after(self, site: Site, output: Any) -> Any:
        call = self._clock.leave(site.name)
        if call is not None and site.name in self._sites:
            self._leave(site, call, open_value(output, self._framework.is_tensor))
        if site.name == "":
            self._collect_remarks()
            self.forward_ended()

    def _leave(self, site: Site, call: ModuleCall, opened: Opened) -> None:
        """Record the outputs of a call that ends, and watch for their gradients."""
        if "output" in self._kinds and not call.recomputed:
            self._record_all(site, call, "output", opened)
        if "grad_output" in self._kinds:
            self._watch_outputs(site, call, opened)
        if call.edges:
            seen, skipped = partial(self._gradient, site, call, "grad_input"), partial(self._skip_share, site)
            inputs = [WatchedInput(edge, partial(seen, path), partial(skipped, path)) for path, edge in call.edges]
            self._step_hooks += self._shares.watch(inputs, [tensor for _, tensor in opened.tensors], call.mark)
        call.inputs, call.edges = {}, ()  # the call is kept for the step, but must not keep the graph alive

    def _record_all(self, site: Site, call: ModuleCall, kind: str, opened: Opened) -> None:
        for path, tensor in opened.tensors:
            key = Key(self._clock.step, call.micro, "forward", site.name, call.number, kind, path)
            self._record(tensor, key, site)
        for name in opened.closed:
            self._book.remark(site.name, f"{kind} of type {name} is not opened")

    # --- backward ----------------------------------------------------------------------------------------------
    def _watch_outputs(self, site: Site, call: ModuleCall, opened: Opened) -> None:
        for path, tensor in opened.tensors:
            if (before := call.inputs.get(id(tensor))) is not None and before == self._framework.version(tensor):
                # The gradient of this tensor is the sum over all uses of the input, not this module's.
                self._book.remark(site.name, f"output {path} is its input, unchanged: no gradient of its own")
                self._book.alias(site.name)
                continue
            seen = partial(self._on_gradient, site, call, "grad_output", path)
            if (remove := self._framework.on_gradient(tensor, seen)) is not None:
                self._step_hooks.append(remove)

    def _edges(self, site: Site, opened: Opened) -> list[tuple[str, Edge]]:
        found: dict[tuple[int, int], str] = {}
        edges = []
        for path, tensor in opened.tensors:
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

    def _gradient(self, site: Site, call: ModuleCall, kind: str, path: str, gradient: Any | None) -> None:
        if gradient is None:
            self._book.remark(site.name, f"{kind} {path}: no gradient came; the loss may not use this output")
            return
        if self.evaluation is not None:
            self.evaluation.gradient_came()
        self._clock.backward_micro = call.micro
        self._book.gradient(site.name)
        key = Key(self._clock.step, call.micro, "backward", site.name, call.number, kind, path)
        self._record(gradient, key, site)

    def _parameter_gradient(self, site: Site, name: str, gradient: Any | None) -> None:
        if not self.armed:  # it belongs to an earlier step
            return
        if gradient is None:
            self._book.remark(site.name, f"param_grad {name}: no gradient came, though backward reached the parameter")
            return
        if self.evaluation is not None:
            self.evaluation.gradient_came()
        self._book.gradient(site.name)
        key = Key(self._clock.step, self._clock.gradient_micro, "backward", site.name, 0, "param_grad", name)
        if not self._clock.reentrant or self._clock.calls_of(site.name) < 2:
            self._record(gradient, key, site)
            return
        # Each region that used the parameter runs a backward of its own, so its gradient comes in several pieces.
        _, sum_so_far = self._pieces.get(key, (site, None))
        total = self._framework.copy(gradient) if sum_so_far is None else self._framework.add(sum_so_far, gradient)
        self._pieces[key] = (site, total)

    def _record_pieces(self) -> None:
        """Record the gradients that came in pieces, after backward."""
        for key, (site, gradient) in self._pieces.items():
            self._record(gradient, key, site)
        self._pieces.clear()

    # --- state -------------------------------------------------------------------------------------------------
    def arm(self) -> None:
        """Record and hook the parameters at the step's first call, since they may have been replaced."""
        self.armed = True
        self._snapshot(call=0)
        if "param_grad" in self._kinds:
            self._hook_parameters()

    def _hook_parameters(self) -> None:
        placed, gone = self._parameter_hooks, set(self._parameter_hooks)  # an interrupt must not lose one
        for site, name, parameter in self._own("param"):
            owner = site.name, name
            gone.discard(owner)
            if (remove := placed.get(owner)) is not None:
                if self._framework.hook_is_current(parameter, remove):
                    continue
                remove()
                del placed[owner]
            if (seen := self._parameter_callbacks.get(owner)) is None:
                seen = self._parameter_callbacks[owner] = partial(self._on_parameter_gradient, site, name)
            if (remove := self._framework.on_parameter_gradient(parameter, seen)) is not None:
                placed[owner] = remove
        for owner in gone:
            placed.pop(owner)()

    def _collect_remarks(self) -> None:
        """Collect remarks of modules whose mode has changed.

        This runs for all modules after a forward. At each call it would take far longer, and at the start of a forward
        a device may wait for it.
        """
        for site in self._chosen_sites:
            mode = getattr(site.owner, "training", None)
            if self._modes.get(site.name, self) is not mode:
                self._modes[site.name] = mode
                self._book.remark(site.name, self._framework.remarks(site.owner))

    def _snapshot(self, call: int) -> None:
        for kind in ("param", "buffer"):
            if kind in self._kinds:
                for site, name, tensor in self._own(kind):
                    self._record(tensor, Key(self._clock.step, 0, "state", site.name, call, kind, name), site)

    def _own(self, kind: str) -> list[tuple[Site, str, Any]]:
        """Return all parameters or buffers of the chosen modules, a shared one under its first name."""
        if kind == "param":
            own = self._framework.parameters_of(self._owners)
        else:
            own = [(at, *each) for at, owner in enumerate(self._owners) for each in self._framework.buffers(owner)]
        first: dict[int, tuple[Site, str]] = {}
        found = []
        for at, name, tensor in own:
            site = self._chosen_sites[at]
            if (known := first.get(id(tensor))) is not None:
                first_name = f"{display_name(known[0].name)}.{known[1]}"
                self._book.remark(site.name, f"{name} is tied to {first_name} and recorded there")
                continue
            first[id(tensor)] = site, name
            found.append((site, name, tensor))
        return found

    def _record(self, tensor: Any, key: Key, site: Site) -> None:
        keep = self._keep[site.name]
        if self.defer(tensor, key, site, keep):
            return
        if reason := self._framework.unreadable(tensor):
            self._book.remark(site.name, f"{key.kind} {key.path} is not recorded: {reason}")
            return
        self._record_now(tensor, key, site, keep)


def _observed(evaluation: Evaluation, before: BeforeCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Show the root's forwards to the evaluation, also in steps that are not recorded."""
    with suppress(Exception):  # no guard surrounds it; in a recorded step the same error occurs inside a guard
        evaluation.observe()
    return before(args, kwargs)

"""Watches the calls and gradients of the chosen modules and hands every tensor on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

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
from tensortap.frameworks.capabilities import Edge

__all__ = ["Watcher"]

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class Watcher:
    """The hooks of one tap. `guard` is put around each of them: it decides whether anyone listens, and catches."""

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
        """Of each module, whether it was in training when it was last remarked upon."""
        self._kinds = frozenset(selection.kinds)
        self._keep = {name: selection.keep_of(name) for name in self._sites}
        self._clock = clock
        self._book = book
        self._hand_on = record
        self.defer: Callable[[Any, Key, Site, Keep], bool] = lambda *_: False
        """Asked first of every tensor: whether it is recorded later, without being handed on now."""
        self.forward_begins: Callable[[], None] = lambda: None
        """Called before the root runs, but not where it repeats what it did."""
        self.forward_over: Callable[[], None] = lambda: None
        """Called when the root has run."""
        self.called_with: Callable[[int, int, str, int, Mapping[str, Any]], None] | None = None
        """OpaqueValue of every call that has other plain arguments than the one before; see `RunWriter.called`."""
        self.evaluation: Evaluation | None = None
        """Decides which calls to ignore because they belong to an evaluation; without it every call is recorded."""
        self._arguments: dict[str, str] = {}
        """The plain arguments of a module's last call, as text; one that never had any is not in here."""
        self._graph: Any = framework  # the observer has checked that it is a GradientGraph if grad_input is recorded
        self._shares = InputGradients(framework, self._graph)
        self._passing: list[Remove] = []  # hooks on tensors and graph nodes: they belong to the step
        self._staying: dict[tuple[str, str], Remove] = {}
        """Hooks on parameters, by module and name. To put them on anew would hold up the beginning of each step, at
        which a device that was waited for has nothing to do."""
        self._pieces: dict[Key, tuple[Site, Any]] = {}
        self.armed = False
        """Whether a module has run in this step."""
        self._feeds = False
        """Whether modules are given other tensors than their own."""
        self._parameters_seen: dict[tuple[str, str], GradientCallback] = {}
        self._use(lambda hook: hook)

    def _use(self, guard: Guard) -> None:
        self._guard = self._shares.guard = guard
        # Guarded once and not for every tensor: what is made for each of a step's gradients, the step waits for.
        self._on_gradient = guard(self._gradient)
        self._on_parameter_gradient = guard(self._parameter_gradient)
        self._parameters_seen.clear()

    def place(self, guard: Guard, undo: ExitStack) -> None:
        """Put hooks on the chosen modules, and on the root, whose forwards count the micro steps."""
        self._use(guard)
        undo.callback(self.drop)
        for site in self._tree.sites:
            if (site.name in self._sites and site.inside is None) or site.name == "":
                before, after = partial(guard(self._begin_call), site), partial(guard(self._end_call), site)
                if site.name == "" and self.evaluation is not None:
                    before = partial(_observed, self.evaluation, before)
                undo.callback(self._framework.on_call(site.module, before, after))

    def end_step(self) -> None:
        """What belongs to the step is finished and taken down."""
        self._shares.finish()
        self._record_pieces()
        if self.evaluation is not None:
            self._book.notice(self.evaluation.end_step())
        if self.armed:
            self._book.captured_steps += 1
            self._snapshot(call=1)
        self._drop_passing()

    def drop(self) -> None:
        """Take every hook off that is not on a module: nobody listens to the next step, or ever again."""
        self._drop_passing()
        for remove in self._staying.values():
            remove()
        self._staying.clear()

    def _drop_passing(self) -> None:
        """They must not fire into a later step."""
        for remove in self._passing:
            remove()
        self._passing.clear()
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
                self._remark_all()  # hooks may change how a module runs in eval mode
            return None
        return self._after(site, output)

    def _before(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._enter(site, open_arguments(args, kwargs, self._framework.is_tensor))

    def _enter(self, site: Site, opened: Opened) -> ModuleCall:
        """The call begins: it is counted, and its inputs are looked at."""
        framework = self._framework
        if not self.armed:
            self.arm()
            if site.name != "":  # whoever calls parts of a model may change their mode before the step is over
                self._remark_all()
        autograd = framework.records_gradients()
        replaying = framework.recomputing()
        # A region under checkpointing runs again in backward: its inputs tell which it was. Under the reentrant one it
        # runs without autograd at first; otherwise it is only of interest what the second run does if that is fed.
        started_from: Sequence[Identity] = ()
        if replaying or not autograd or self._feeds:
            started_from = [i for _, t in opened.tensors if (i := framework.identity(t)) is not None]
        call = (self._clock.enter_again if replaying else self._clock.enter)(site.name, started_from)
        call.autograd = autograd
        if site.name == "" and not replaying:
            self._record_pieces()
            self.forward_begins()
        if site.name not in self._sites:
            return call
        if "grad_output" in self._kinds:
            call.inputs = {id(tensor): framework.version(tensor) for _, tensor in opened.tensors}
        if "grad_input" in self._kinds and autograd:
            call.mark = framework.mark()
            call.edges = self._edges(site, opened)
        if call.replay:
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
        text = repr(arguments)  # which tells True from 1, and takes half as long as JSON
        if self._arguments.get(call.module) != text:
            self._arguments[call.module] = text
            self.called_with(self._clock.step, call.micro, call.module, call.number, arguments)

    def _after(self, site: Site, output: Any) -> Any:
        call = self._clock.leave(site.name)
        if call is not None and site.name in self._sites:
            self._leave(site, call, open_value(output, self._framework.is_tensor))
        if site.name == "":
            self._remark_all()
            self.forward_over()

    def _leave(self, site: Site, call: ModuleCall, opened: Opened) -> None:
        """The call is over: its outputs are looked at, and their gradients will be."""
        if "output" in self._kinds and not call.replay:
            self._record_all(site, call, "output", opened)
        if "grad_output" in self._kinds:
            self._watch_outputs(site, call, opened)
        if call.edges:
            seen, skipped = partial(self._gradient, site, call, "grad_input"), partial(self._skip_share, site)
            inputs = [WatchedInput(edge, partial(seen, path), partial(skipped, path)) for path, edge in call.edges]
            self._passing += self._shares.watch(inputs, [tensor for _, tensor in opened.tensors], call.mark)
        call.inputs, call.edges = {}, ()  # the call is remembered for the step, but must not keep the graph alive

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
                # The gradient of this tensor is the sum over everybody who used the input: not this module's.
                self._book.remark(site.name, f"output {path} is its input, unchanged: no gradient of its own")
                self._book.alias(site.name)
                continue
            seen = partial(self._on_gradient, site, call, "grad_output", path)
            if (remove := self._framework.on_gradient(tensor, seen)) is not None:
                self._passing.append(remove)

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
            self._book.remark(site.name, f"{kind} {path}: no gradient came, as of an output that the loss does not use")
            return
        if self.evaluation is not None:
            self.evaluation.gradient_came()
        self._clock.backward_micro = call.micro
        self._book.gradient(site.name)
        key = Key(self._clock.step, call.micro, "backward", site.name, call.number, kind, path)
        self._record(gradient, key, site)

    def _parameter_gradient(self, site: Site, name: str, gradient: Any | None) -> None:
        if not self.armed:  # of a step before this one
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
        # Each region that used the parameter runs a backward of its own: its gradient comes in as many pieces.
        _, sum_so_far = self._pieces.get(key, (site, None))
        total = self._framework.copy(gradient) if sum_so_far is None else self._framework.add(sum_so_far, gradient)
        self._pieces[key] = (site, total)

    def _record_pieces(self) -> None:
        """Backward is over: what came in pieces is whole now."""
        for key, (site, gradient) in self._pieces.items():
            self._record(gradient, key, site)
        self._pieces.clear()

    # --- state -------------------------------------------------------------------------------------------------
    def arm(self) -> None:
        """The step's first call: parameters are looked at now, since they may have been replaced since the last."""
        self.armed = True
        self._snapshot(call=0)
        if "param_grad" in self._kinds:
            self._hook_parameters()

    def _hook_parameters(self) -> None:
        staying, gone = self._staying, set(self._staying)  # whatever happens here, none is forgotten
        for site, name, parameter in self._own("param"):
            place = site.name, name
            gone.discard(place)
            if (remove := staying.get(place)) is not None:
                if self._framework.hook_is_current(parameter, remove):
                    continue
                remove()
                del staying[place]
            if (seen := self._parameters_seen.get(place)) is None:
                seen = self._parameters_seen[place] = partial(self._on_parameter_gradient, site, name)
            if (remove := self._framework.on_parameter_gradient(parameter, seen)) is not None:
                staying[place] = remove
        for place in gone:
            staying.pop(place)()

    def _remark_all(self) -> None:
        """Modules may have been put into another mode. Asked all at once, when a forward is over: at each call it would
        take far longer, and at the beginning a device may wait for it."""
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
        """All parameters or buffers of the chosen modules, a shared one under its first name."""
        if kind == "param":
            own = self._framework.parameters_of(self._owners)
        else:
            own = [(at, *each) for at, owner in enumerate(self._owners) for each in self._framework.buffers(owner)]
        first: dict[int, tuple[Site, str]] = {}
        found = []
        for at, name, tensor in own:
            site = self._chosen_sites[at]
            if (known := first.get(id(tensor))) is not None:
                place = f"{display_name(known[0].name)}.{known[1]}"
                self._book.remark(site.name, f"{name} is tied to {place} and recorded there")
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
        self._hand_on(tensor, key, site, keep)


def _observed(evaluation: Evaluation, before: BeforeCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Show the root's forwards to the evaluation also in steps that are not recorded."""
    evaluation.observe()
    return before(args, kwargs)

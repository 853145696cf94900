"""Calls inside compiled graphs: taps in the compiled code show their tensors, and the watcher records them as usual.

A graph's own call is seen twice: from outside, with the tensors that the caller holds, and from inside. The first is
recorded. Only the view from inside shows which outputs of the graph are outputs of a module in it, so that their
gradient is the sum over all uses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.tree import Site
from tensortap.capture.recording.slots import RecordSlot
from tensortap.capture.watching.clock import Clock, ModuleCall
from tensortap.capture.watching.flatten import Opened
from tensortap.capture.watching.module_hooks import HookedModule
from tensortap.frameworks.base import AfterCall, BeforeCall
from tensortap.frameworks.capabilities import GraphPoint, GraphTaps

__all__ = ["CallRecorder", "InsideCalls", "InsideOptions"]

_CallInRun = tuple[int, int]
"""The number of a run of a graph, and of a call in the graph."""
_MOST_POINTS = 10_000
"""Slots of a module that are kept: a step that never ends must not grow for ever."""


@dataclass(frozen=True)
class InsideOptions:
    """Options for modules inside compiled graphs."""

    emulate_casts: bool = False
    """Whether compiled code rounds between operations, as uncompiled code does."""


class CallRecorder(Protocol):
    """The part of a watcher that records calls."""

    def graph_begins(self, autograd: bool) -> tuple[Clock, ModuleCall | None, str]:
        """Begin a run of a compiled graph. Return its clock, the call that it is part of, and its phase.

        The phase is empty if the run is not recorded.
        """

    def begin_inside(self, site: Site, call: ModuleCall, phase: str) -> None:
        """Begin a call, before anything of it is recorded."""

    def inputs_inside(self, site: Site, call: ModuleCall, phase: str, opened: Opened) -> None:
        """Record the inputs of a call."""

    def outputs_inside(self, site: Site, call: ModuleCall, phase: str, opened: Opened) -> None:
        """Record the outputs of a call."""

    @property
    def repeats_steps(self) -> bool:
        """Whether a call that is like one of an earlier step needs only its records."""

    def slots_inside(self, site: Site, call: ModuleCall, kind: str, opened: Opened) -> Sequence[RecordSlot] | None:
        """Return the slots of a call's tensors; None if every such call needs more than recording its tensors."""

    def record_inside(self, slots: Sequence[RecordSlot], tensors: Sequence[Any]) -> None:
        """Record the tensors of a call that is like one of an earlier step."""

    def gradient_inside(self, site: Site, call: ModuleCall, kind: str, path: str, gradient: Any) -> None:
        """Record a gradient of a call."""

    def forget(self, tensor: Any) -> None:
        """Treat a tensor as a new one: its memory has other values than when it was last seen."""

    def code_changed(self) -> None:
        """Prepare for other compiled code than before."""


class _GraphRun:
    """One run of the forward of a compiled graph. Its events come in any order: the compiler moves them."""

    def __init__(self, number: int, clock: Clock, around: ModuleCall | None, phase: str, bases: dict[str, int]) -> None:
        self.number = number
        self.seen: set[GraphPoint] = set()
        """Points that were reached."""
        self.around = around
        """The call that the graph is part of."""
        self.phase = phase
        self.recomputed = around is not None and around.recomputed
        self.repeats = False
        """Whether calls that are like those of an earlier step are recorded in the slots of that."""
        self.micro = clock.micro if around is None else around.micro
        self._clock = clock
        self._bases = bases
        """Number of calls of each module in the micro step before this run."""
        self._calls: dict[int, ModuleCall] = {}

    def number_of(self, site: Site, point: GraphPoint) -> int:
        """Return the number that a call has, or will have, among those of its module in the micro step."""
        if (base := self._bases.get(site.name)) is None:
            base = self._bases[site.name] = self._clock.calls_of(site.name)
        return base + int(point.spec["nth"])

    def call(self, site: Site, number: int, spec: Mapping[str, Any]) -> tuple[ModuleCall, bool]:
        """Return a call by its number in the graph, and whether this is its first event."""
        if (known := self._calls.get(number)) is not None:
            return known, False
        base = self._bases.setdefault(site.name, self._clock.calls_of(site.name))
        call = self._clock.count_in_graph(
            site.name, self.micro, base + spec["nth"], self.recomputed, outermost=self.around is None
        )
        call.autograd, call.reached = spec["autograd"], spec["reached"]
        self._calls[number] = call
        return call, True


class InsideCalls:
    """The taps of one observer inside compiled graphs."""

    def __init__(self, taps: GraphTaps, recorder: CallRecorder, book: CoverageBook) -> None:
        self._taps = taps
        self._recorder = recorder
        self._book = book
        self._guard: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda hook: hook
        self._begun: dict[_CallInRun, tuple[Site, ModuleCall]] = {}
        """Calls of this step whose gradients may come."""
        self._around: dict[_CallInRun, tuple[Site, ModuleCall]] = {}
        """The graphs' own calls of this step, which are recorded from outside, except for some gradients."""
        self._aliases: dict[tuple[_CallInRun, str], list[tuple[Site, ModuleCall, str]]] = {}
        """For an output whose gradient is tapped: the calls around that return it, too."""
        self._run: _GraphRun | None = None
        self._runs: dict[tuple[str, str, int, int], list[dict[str, int]]] = {}
        """For the calls of this step that contain graphs: the `bases` of each of their runs."""
        self._repeated: dict[ModuleCall, int] = {}
        """Number of runs of a recomputed call that have begun."""
        self._values: dict[Hashable, Any] = {}
        """By address: the value that was last seen there, as the run of its graph and its number in it."""
        self.address: Callable[[Any], Hashable] = lambda _: 0
        """Returns where the elements of a tensor are."""
        self._slots: dict[str, dict[tuple[GraphPoint, int, int], Sequence[RecordSlot]]] = {}
        """By module, then by point, micro step and number of the call: the slots of its tensors. A point of compiled
        code has the same tensors in every step, so everything else about it was noted in an earlier one.
        """
        self._traced = 0
        """Number of graphs when the newest run began."""
        self.at_once = False
        """Whether tensors must be read at once, because it is unknown how long their memory keeps them."""

    def use(self, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wrap every event in a guard."""
        self._guard = guard

    def place(self, sites: Sequence[Site], hooked: Sequence[HookedModule], calls: Mapping[str, Any]) -> None:
        """Tap these modules. `calls` returns, by name, the callbacks around an uncompiled call of a module that has no
        hooks of its own.
        """
        event = self._guard(self._event)
        wanted = {}
        for site in sites:
            if site.callable:
                before, after = calls.get(site.name, (None, None))
                forget = partial(self._slots.pop, site.name, None)
                wanted[id(site.owner)] = site.owner, _SiteReceiver(site, event, before, after, forget)
        self._slots.clear()
        if self._taps.place(wanted, [each.module for each in hooked]):
            self._book.notice(
                "compiled code is compiled again, with taps; after the tap is closed, once more without them"
            )

    def close(self) -> None:
        """Remove all taps."""
        self._taps.close()

    def drop(self) -> None:
        """Forget the calls of a step that is over."""
        self._begun.clear()
        self._around.clear()
        self._aliases.clear()
        self._runs.clear()
        self._repeated.clear()
        self._run = None
        self._values.clear()

    # --- events ------------------------------------------------------------------------------------------------
    def _event(self, site: Site, point: GraphPoint, number: int, tensors: Sequence[Any]) -> None:
        # This runs between the kernels of compiled code, on the thread that launches them.
        if point.event != "enter" and point.event != "leave":
            self._gradient(point.event, (number, point.call), point.spec["path"], tensors[0])
            return
        run = self._run_of(point, number)
        if run is None or (run.repeats and self._repeat(site, point, run, tensors)):
            return
        if point.event == "enter":
            slots = self._entered(site, run, (number, point.call), tensors, point.spec)
        else:
            slots = self._left(site, run, (number, point.call), tensors, point.spec)
        if run.repeats and slots is not None:
            known = self._slots.setdefault(site.name, {})
            if len(known) < _MOST_POINTS:
                known[point, run.micro, run.number_of(site, point)] = slots

    def _repeat(self, site: Site, point: GraphPoint, run: _GraphRun, tensors: Sequence[Any]) -> bool:
        """Record the tensors at a point that an earlier step has reached in the same way. Return whether one has."""
        if (known := self._slots.get(site.name)) is None:
            return False
        if (slots := known.get((point, run.micro, run.number_of(site, point)))) is None:
            return False
        call, spec = (run.number, point.call), point.spec
        found = self._call(site, run, point.call, spec)
        if point.event == "leave":
            self._await_gradients(site, found, call, spec)
        self._see_values(call, tensors, spec)
        self._recorder.record_inside(slots, tensors)
        return True

    def _run_of(self, point: GraphPoint, number: int) -> _GraphRun | None:
        """Return the run of a graph that reaches a point; None if it is not recorded.

        Runs without autograd share their number, but none reaches a point twice.
        """
        run = self._run
        if run is None or run.number != number or point in run.seen:
            if self._traced != self._taps.traced:
                self._traced = self._taps.traced
                for text in self._taps.notices:
                    self._book.notice(text)
                self._recorder.code_changed()
            self.at_once = self._taps.replays
            clock, around, phase = self._recorder.graph_begins(point.spec["autograd"])
            self._run = run = _GraphRun(number, clock, around, phase, self._bases_of(around, phase))
            inner = around is not None and not run.recomputed and phase == "forward"
            run.repeats = inner and not self.at_once and self._recorder.repeats_steps
        run.seen.add(point)
        return run if run.phase else None

    def _bases_of(self, around: ModuleCall | None, phase: str) -> dict[str, int]:
        """Return the numbers of calls of modules before a run: for a recomputation, before the run that it repeats."""
        if around is None:
            return {}
        runs = self._runs.setdefault((phase, around.module, around.micro, around.number), [])
        if not around.recomputed:
            runs.append({})
            return runs[-1]
        again = self._repeated.get(around, 0)
        self._repeated[around] = again + 1
        return runs[again] if again < len(runs) else {}

    def _call(self, site: Site, run: _GraphRun, number: int, spec: Mapping[str, Any]) -> ModuleCall:
        if spec["outermost"] and run.around is not None and run.around.module == site.name:
            return run.around  # the graph's own call, which is recorded from outside
        found, first = run.call(site, number, spec)
        if first:
            self._recorder.begin_inside(site, found, run.phase)
        return found

    def _entered(
        self, site: Site, run: _GraphRun, call: _CallInRun, tensors: Sequence[Any], spec: Mapping[str, Any]
    ) -> Sequence[RecordSlot] | None:
        """Record the inputs of a call. Return their slots, if later steps need only those."""
        begun = self._call(site, run, call[1], spec)
        if begun is run.around:
            return None
        for first, path in spec.get("repeated", ()):
            self._book.remark(site.name, f"grad_input {first} is for input {path} too: they are one tensor")
        self._see_values(call, tensors, spec)
        opened = _opened(tensors, spec)
        self._recorder.inputs_inside(site, begun, run.phase, opened)
        return self._recorder.slots_inside(site, begun, "input", opened)

    def _left(
        self, site: Site, run: _GraphRun, call: _CallInRun, tensors: Sequence[Any], spec: Mapping[str, Any]
    ) -> Sequence[RecordSlot] | None:
        """Record the outputs of a call in the same way, and its inputs if it has not shown its beginning."""
        entered = spec.get("entered")
        repeats = entered is None or self._entered(site, run, call, (), entered) is not None
        ended = self._call(site, run, call[1], spec)
        if ended is run.around:
            self._note_aliases(site, ended, call, spec)
            ended.watched_inside = frozenset(spec.get("aliases", {})) | frozenset(spec.get("used_inside", ()))
            self._around[call] = site, ended
            return None
        self._await_gradients(site, ended, call, spec)
        for path in spec.get("unchanged", ()):
            self._book.remark(site.name, f"output {path} is its input, unchanged: no gradient of its own")
            self._book.alias(site.name)
        for path in spec.get("left_out", ()):
            self._book.remark(site.name, f"grad_output {path} is not recorded: it is a view that changes in place")
        self._see_values(call, tensors, spec)
        opened = _opened(tensors, spec)
        self._recorder.outputs_inside(site, ended, run.phase, opened)
        return self._recorder.slots_inside(site, ended, "output", opened) if repeats else None

    def _await_gradients(self, site: Site, call: ModuleCall, in_run: _CallInRun, spec: Mapping[str, Any]) -> None:
        """Keep a call that has ended for its gradients."""
        if "aliases" in spec:
            self._note_aliases(site, call, in_run, spec)
            self._begun[in_run] = site, call
        elif "tapped" in spec:  # else the graph may have no backward, and its run no number
            self._begun[in_run] = site, call

    def _note_aliases(self, site: Site, call: ModuleCall, around: _CallInRun, spec: Mapping[str, Any]) -> None:
        for path, (number, source) in spec.get("aliases", {}).items():
            of = (around[0], number), source
            self._aliases.setdefault(of, []).append((site, call, path))

    def _gradient(self, kind: str, call: _CallInRun, path: str, gradient: Any) -> None:
        found = self._begun.get(call)
        around = self._around.get(call) if kind == "grad_output" else None
        if around is not None and path in around[1].watched_inside:
            found = around
        also = self._aliases.get((call, path), ()) if kind == "grad_output" else ()
        if found is None and not also:  # it belongs to an earlier step
            return
        self._changed(gradient, None)
        if found is not None:
            self._recorder.gradient_inside(*found, kind, path, gradient)
        for site, containing, its_path in also:
            self._recorder.gradient_inside(site, containing, kind, its_path, gradient)

    def _see_values(self, call: _CallInRun, tensors: Sequence[Any], spec: Mapping[str, Any]) -> None:
        """Note the memory of a call's tensors, except for those from outside, whose versions are counted."""
        for tensor, number in zip(tensors, spec["values"], strict=False):
            if number >= 0:
                self._changed(tensor, (call[0], number))

    def _changed(self, tensor: Any, value: tuple[int, int] | None) -> None:
        """Forget a tensor whose memory compiled code has reused, which no version counts."""
        address = self.address(tensor)
        if address in self._values and (value is None or self._values[address] != value):
            self._recorder.forget(tensor)
        self._values[address] = value


def _opened(tensors: Sequence[Any], spec: Mapping[str, Any]) -> Opened:
    return Opened(
        list(zip(spec["paths"], tensors, strict=False)),
        spec.get("closed", []),
        arguments=spec.get("plain", {}),
        detached=spec.get("detached", ()),
        paths=spec["paths"],
        in_graph=spec["made"],
    )


class _SiteReceiver:
    """Receives the events of one module. Implements `capabilities.GraphReceiver`."""

    __slots__ = ("_after", "_before", "_event", "_site", "_uncompiled")

    def __init__(
        self,
        site: Site,
        event: Callable[..., Any],
        before: BeforeCall | None,
        after: AfterCall | None,
        uncompiled: Callable[[], Any],
    ) -> None:
        """`uncompiled` is called before a call that runs uncompiled."""
        self._site = site
        self._event = event
        self._before = before
        self._after = after
        self._uncompiled = uncompiled

    def event(self, point: GraphPoint, run: int, values: Sequence[Any]) -> None:
        self._event(self._site, point, run, values)

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._uncompiled()
        if self._before is not None:
            self._before(args, kwargs)

    def after(self, output: Any) -> None:
        if self._after is not None:
            self._after(output)

"""Calls inside compiled graphs: taps in the compiled code show their tensors, and the watcher records them as usual.

A graph's own call is seen twice: from outside, with the tensors that the caller holds, and from inside. The first is
recorded. From inside comes what cannot be seen otherwise: which outputs of the graph are outputs of a module in it, so
that their gradient is the sum over all uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tensortap.capture.clock import Clock, ModuleCall
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.flatten import Opened
from tensortap.capture.module_hooks import HookedModule
from tensortap.capture.tree import Site
from tensortap.frameworks.base import AfterCall, BeforeCall
from tensortap.frameworks.capabilities import GraphCall, GraphTaps

__all__ = ["CallRecorder", "InsideCalls", "InsideOptions"]


@dataclass(frozen=True)
class InsideOptions:
    """How modules inside compiled graphs are seen."""

    emulate_casts: bool = False
    """Whether compiled code rounds between operations, as uncompiled code does."""


class CallRecorder(Protocol):
    """The part of a watcher that records calls."""

    def graph_begins(self, autograd: bool) -> tuple[Clock, ModuleCall | None, str]:
        """Begin a run of a compiled graph. Return its clock, the call that it is part of, and its phase: an empty one
        if it is not recorded."""

    def begin_inside(self, site: Site, call: ModuleCall, phase: str) -> None:
        """Begin a call, before anything of it is recorded."""

    def inputs_inside(self, site: Site, call: ModuleCall, phase: str, opened: Opened) -> None:
        """Record the inputs of a call."""

    def outputs_inside(self, site: Site, call: ModuleCall, phase: str, opened: Opened) -> None:
        """Record the outputs of a call."""

    def gradient_inside(self, site: Site, call: ModuleCall, kind: str, path: str, gradient: Any) -> None:
        """Record a gradient of a call."""

    @property
    def forget(self) -> Callable[[Any], None]:
        """Called with a tensor whose memory has other values than when it was last seen."""


class _GraphRun:
    """One run of the forward of a compiled graph. Its events come in any order: the compiler moves them."""

    def __init__(self, number: int, clock: Clock, around: ModuleCall | None, phase: str, bases: dict[str, int]) -> None:
        self.number = number
        self.seen: set[tuple[str, int]] = set()
        """Events that came, with the number of their call."""
        self.around = around
        """The call that the graph is part of."""
        self.phase = phase
        self.recomputed = around is not None and around.recomputed
        self._clock = clock
        self._bases = bases
        """How often each module was called in the micro step before this run."""
        self._micro = clock.micro if around is None else around.micro
        self._calls: dict[int, ModuleCall] = {}

    def call(self, site: Site, number: int, spec: Mapping[str, Any]) -> tuple[ModuleCall, bool]:
        """Return a call by its number in the graph, and whether this is its first event."""
        if (known := self._calls.get(number)) is not None:
            return known, False
        base = self._bases.setdefault(site.name, self._clock.calls_of(site.name))
        call = self._clock.count_in_graph(
            site.name, self._micro, base + spec["nth"], self.recomputed, outermost=self.around is None
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
        self._begun: dict[GraphCall, tuple[Site, ModuleCall]] = {}
        """Calls of this step whose gradients may come."""
        self._around: dict[GraphCall, tuple[Site, ModuleCall]] = {}
        """The graphs' own calls of this step, which are recorded from outside, but for some gradients."""
        self._aliases: dict[tuple[GraphCall, str], list[tuple[Site, ModuleCall, str]]] = {}
        """For an output whose gradient is tapped: the calls around that return it, too."""
        self._run: _GraphRun | None = None
        self._runs: dict[tuple[str, str, int, int], list[dict[str, int]]] = {}
        """For the calls of this step that contain graphs: the `bases` of each of their runs."""
        self._repeated: dict[ModuleCall, int] = {}
        """How many of the runs of a recomputed call have begun."""
        self._values: dict[int, tuple[int, int]] = {}
        """By address: the value that was last seen there, as the run of its graph and its number in it."""
        self.address: Callable[[Any], int] = lambda _: 0
        """Returns where the elements of a tensor are."""

    def use(self, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wrap every event in a guard."""
        self._guard = guard

    def place(self, sites: Sequence[Site], hooked: Sequence[HookedModule], calls: Mapping[str, Any]) -> None:
        """Tap these modules. `calls` returns, by name, what to call around an uncompiled call of a module that has no
        hooks of its own."""
        event = self._guard(self._event)
        wanted = {}
        for site in sites:
            if site.callable:
                before, after = calls.get(site.name, (None, None))
                wanted[id(site.owner)] = site.owner, _SiteReceiver(site, event, before, after)
        if self._taps.place(wanted, [each.module for each in hooked]):
            self._book.notice(
                "what was compiled before is compiled again, with taps; after the tap is closed, once more without them"
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
    def _event(self, site: Site, event: str, call: GraphCall, tensors: Sequence[Any], spec: Mapping[str, Any]) -> None:
        if event == "enter":
            self._entered(site, call, tensors, spec)
        elif event == "leave":
            if (entered := spec.get("entered")) is not None:
                self._entered(site, call, (), entered)
            self._left(site, call, tensors, spec)
        else:
            self._gradient(event, call, spec["path"], tensors[0])

    def _run_of(self, event: str, call: GraphCall, spec: Mapping[str, Any]) -> _GraphRun | None:
        """Return the run of a graph that an event belongs to; None if it is not recorded.

        Runs without autograd share their number, but none has an event twice.
        """
        run = self._run
        if run is None or run.number != call.run or (event, call.number) in run.seen:
            clock, around, phase = self._recorder.graph_begins(spec["autograd"])
            self._run = run = _GraphRun(call.run, clock, around, phase, self._bases_of(around, phase))
        run.seen.add((event, call.number))
        return run if run.phase else None

    def _bases_of(self, around: ModuleCall | None, phase: str) -> dict[str, int]:
        """Return how often modules were called before a run: for a recomputation, before the run that it repeats."""
        if around is None:
            return {}
        runs = self._runs.setdefault((phase, around.module, around.micro, around.number), [])
        if not around.recomputed:
            runs.append({})
            return runs[-1]
        again = self._repeated.get(around, 0)
        self._repeated[around] = again + 1
        return runs[again] if again < len(runs) else {}

    def _call(
        self, event: str, site: Site, call: GraphCall, spec: Mapping[str, Any]
    ) -> tuple[_GraphRun, ModuleCall] | None:
        if (run := self._run_of(event, call, spec)) is None:
            return None
        if spec["outermost"] and run.around is not None and run.around.module == site.name:
            return run, run.around  # the graph's own call, which is recorded from outside
        found, first = run.call(site, call.number, spec)
        if first:
            self._recorder.begin_inside(site, found, run.phase)
        return run, found

    def _entered(self, site: Site, call: GraphCall, tensors: Sequence[Any], spec: Mapping[str, Any]) -> None:
        if (found := self._call("enter", site, call, spec)) is None or found[0].around is found[1]:
            return
        run, begun = found
        for first, path in spec.get("repeated", ()):
            self._book.remark(site.name, f"grad_input {first} is for input {path} too: they are one tensor")
        self._recorder.inputs_inside(site, begun, run.phase, self._opened(call, tensors, spec))

    def _left(self, site: Site, call: GraphCall, tensors: Sequence[Any], spec: Mapping[str, Any]) -> None:
        if (found := self._call("leave", site, call, spec)) is None:
            return
        run, ended = found
        self._note_aliases(site, ended, call, spec)
        if ended is run.around:
            ended.watched_inside = frozenset(spec.get("aliases", {})) | frozenset(spec.get("used_inside", ()))
            self._around[call] = site, ended
            return
        if "tapped" in spec or "aliases" in spec:  # else the graph may have no backward, and its run no number
            self._begun[call] = site, ended
        for path in spec.get("unchanged", ()):
            self._book.remark(site.name, f"output {path} is its input, unchanged: no gradient of its own")
            self._book.alias(site.name)
        for path in spec.get("left_out", ()):
            self._book.remark(site.name, f"grad_output {path} is not recorded: it is a view that changes in place")
        self._recorder.outputs_inside(site, ended, run.phase, self._opened(call, tensors, spec))

    def _note_aliases(self, site: Site, call: ModuleCall, around: GraphCall, spec: Mapping[str, Any]) -> None:
        for path, (number, source) in spec.get("aliases", {}).items():
            of = GraphCall(around.run, number), source
            self._aliases.setdefault(of, []).append((site, call, path))

    def _gradient(self, kind: str, call: GraphCall, path: str, gradient: Any) -> None:
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

    def _opened(self, call: GraphCall, tensors: Sequence[Any], spec: Mapping[str, Any]) -> Opened:
        for tensor, number in zip(tensors, spec["values"], strict=False):
            self._changed(tensor, number if number < 0 else (call.run, number))
        return Opened(
            list(zip(spec["paths"], tensors, strict=False)),
            spec.get("closed", []),
            arguments=spec.get("plain", {}),
            detached=spec.get("detached", ()),
            paths=spec["paths"],
        )

    def _changed(self, tensor: Any, value: Any) -> None:
        """Forget a tensor whose memory compiled code has reused, which no version counts. A negative value is that of
        a tensor from outside of the graph, whose versions are counted."""
        if isinstance(value, int):
            return
        address = self.address(tensor)
        if address in self._values and (value is None or self._values[address] != value):
            self._recorder.forget(tensor)
        self._values[address] = value


class _SiteReceiver:
    """Receives what one module does. Implements `capabilities.GraphReceiver`."""

    __slots__ = ("_after", "_before", "_event", "_site")

    def __init__(
        self, site: Site, event: Callable[..., Any], before: BeforeCall | None, after: AfterCall | None
    ) -> None:
        self._site = site
        self._event = event
        self._before = before
        self._after = after

    def event(self, event: str, call: GraphCall, values: Sequence[Any], spec: Mapping[str, Any]) -> None:
        self._event(self._site, event, call, values, spec)

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._before is not None:
            self._before(args, kwargs)

    def after(self, output: Any) -> None:
        if self._after is not None:
            self._after(output)

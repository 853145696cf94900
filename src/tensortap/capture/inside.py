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
    """The part of a watcher that counts and records calls."""

    def begin_inside(self, site: Site, opened: Opened, autograd: bool) -> ModuleCall | None:
        """Begin a call; None if it is not recorded."""

    def end_inside(self, site: Site, opened: Opened) -> ModuleCall | None:
        """End a call; None if it is not recorded."""

    def gradient_inside(self, site: Site, call: ModuleCall, kind: str, path: str, gradient: Any) -> None:
        """Record a gradient of a call."""

    def innermost(self) -> ModuleCall | None:
        """Return the innermost call in progress."""

    @property
    def forget(self) -> Callable[[Any], None]:
        """Called with a tensor whose memory has other values than when it was last seen."""


class InsideCalls:
    """The taps of one observer inside compiled graphs."""

    def __init__(self, taps: GraphTaps, recorder: CallRecorder, clock: Clock, book: CoverageBook) -> None:
        self._taps = taps
        self._recorder = recorder
        self._clock = clock
        self._book = book
        self._guard: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda hook: hook
        self._begun: dict[GraphCall, tuple[Site, ModuleCall]] = {}
        """Calls of this step whose gradients may come."""
        self._around: dict[GraphCall, tuple[Site, ModuleCall]] = {}
        """The graphs' own calls of this step, which are recorded from outside, but for some gradients."""
        self._aliases: dict[tuple[GraphCall, str], list[tuple[Site, ModuleCall, str]]] = {}
        """For an output whose gradient is tapped: the calls around that return it, too."""
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

    def _entered(self, site: Site, call: GraphCall, tensors: Sequence[Any], spec: Mapping[str, Any]) -> None:
        top = self._recorder.innermost()
        if top is not None and top.module == site.name and not top.in_graph:  # the graph's own call, seen from outside
            top.in_graph = top.around_graph = True
            return
        begun = self._recorder.begin_inside(site, self._opened(call, tensors, spec), spec["autograd"])
        if begun is None:
            return
        begun.in_graph = True
        for first, path in spec.get("repeated", ()):
            self._book.remark(site.name, f"grad_input {first} is for input {path} too: they are one tensor")

    def _left(self, site: Site, call: GraphCall, tensors: Sequence[Any], spec: Mapping[str, Any]) -> None:
        top = self._recorder.innermost()
        if top is not None and top.module == site.name and top.around_graph:
            top.around_graph = False
            self._note_aliases(site, top, call, spec)
            top.watched_inside = frozenset(spec.get("aliases", {})) | frozenset(spec.get("used_inside", ()))
            self._around[call] = site, top
            return
        ended = self._recorder.end_inside(site, self._opened(call, tensors, spec))
        if ended is None:
            return
        if "tapped" in spec or "aliases" in spec:  # else the graph may have no backward, and its run no number
            self._begun[call] = site, ended
        for path in spec.get("unchanged", ()):
            self._book.remark(site.name, f"output {path} is its input, unchanged: no gradient of its own")
            self._book.alias(site.name)
        for path in spec.get("left_out", ()):
            self._book.remark(site.name, f"grad_output {path} is not recorded: it is a view that changes in place")
        self._note_aliases(site, ended, call, spec)

    def _note_aliases(self, site: Site, call: ModuleCall, around: GraphCall, spec: Mapping[str, Any]) -> None:
        for path, (number, source) in spec.get("aliases", {}).items():
            of = GraphCall(around.run, number), source
            self._aliases.setdefault(of, []).append((site, call, path))

    def _gradient(self, kind: str, call: GraphCall, path: str, gradient: Any) -> None:
        found = self._begun.get(call)
        if (around := self._around.get(call)) is not None and path in around[1].watched_inside:
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

"""Names the modules in a profile: nested spans around every forward, backward and recomputation."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from tensortap.capture.flatten import open_arguments, open_value
from tensortap.capture.selection import Selection
from tensortap.capture.tree import Site, Tree
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework
from tensortap.frameworks.module_notes import ModuleNotes
from tensortap.frameworks.profiling import profiling_of
from tensortap.model.profile.backward_spans import Backward, ByCall, ByNode
from tensortap.model.profile.calibration import CalibrationCalls
from tensortap.model.profile.spans import Call, Spans
from tensortap.times.marks import AFTER, BEFORE

__all__ = ["Annotation", "annotate"]


def annotate(
    model: Any,
    *,
    modules: str | Sequence[str] | Callable[[str, Any], bool] = "*",
    forward: bool = True,
    backward: bool = True,
    name: str = "",
) -> Annotation:
    """Put spans around the modules of a torch or paddle model until `close()` or the end of the `with` block.

    They are named `forward layers.0.fc1 (Linear)`, `backward …`, and `recompute …` for what activation checkpointing
    runs again. No number changes. `name` goes before the names of all modules, to tell several models in one profile
    apart. Annotating a model a second time adds nothing: its spans stay until both handles are closed. Raise UsageError
    if a module is already annotated with other options or as part of another model.

    >>> with tensortap.annotate(model), torch.profiler.profile() as prof:
    ...     model(x).sum().backward()
    >>> print(tensortap.module_times(prof))
    """
    if not (forward or backward):
        raise UsageError("annotate: with forward=False and backward=False there is nothing to mark")
    model = network_of(model)
    framework = framework_of(model)
    selection = Selection(modules=modules)
    tree = Tree(framework, model)
    chosen = [site for site in tree.sites if selection.wants_module(site.name, site.cls, site.owner)]
    selection.check_found(len(chosen), [site.name for site in tree.sites], {site.cls for site in tree.sites})
    sites = [site for site in chosen if site.callable and site.inside is None]
    options = _Options(forward, backward, name)
    return Annotation(_placed_before(sites, options) or _Marks(framework, sites, options))


@dataclass(frozen=True)
class _Options:
    forward: bool
    backward: bool
    name: str

    def label(self, site: Site) -> str:
        """`layers.0.fc1 (Linear)`; what reads it back takes the class from the last parentheses."""
        module = ".".join(part for part in (self.name, site.name) if part)
        return f"{display_name(module)} ({site.cls.translate(_BRACKETS)})"


_BRACKETS = str.maketrans("()", "[]")


class Annotation:
    """A handle of the spans of one model. A context manager; or call `close()` when done."""

    def __init__(self, marks: _Marks) -> None:
        self._marks = marks
        marks.handles.add(self)

    def close(self) -> None:
        """Remove the spans, also from graphs that still wait for their backward.

        They stay while another handle of the same spans is in use.
        """
        self._marks.handles.discard(self)
        if not self._marks.handles:
            self._marks.close()

    def __enter__(self) -> Annotation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_annotated: ModuleNotes[weakref.ref[_Marks]] = ModuleNotes()
"""The marks on each module; its hooks keep them alive."""


def _placed_before(sites: Sequence[Site], options: _Options) -> _Marks | None:
    """The marks that are already on exactly these modules, if there are any."""
    found = [(site, note()) for site in sites if (note := _annotated.get(site.module)) is not None]
    open_ones = [(site, marks) for site, marks in found if marks is not None and not marks.closed]
    if not open_ones:
        return None
    site, marks = open_ones[0]
    same = len(open_ones) == len(sites) == marks.count and all(each is marks for _, each in open_ones)
    if same and marks.options == options:
        return marks
    raise UsageError(
        f"annotate: {display_name(site.name)} ({site.cls}) is already annotated, with other options or as part of "
        "another model. Close that annotation first: leave its `with` block or call its close()"
    )


class _Marks:
    """The hooks that open and close the spans."""

    def __init__(self, framework: Framework, sites: Sequence[Site], options: _Options) -> None:
        self._framework = framework
        self._profiling = profiling_of(framework)
        self._spans = Spans(self._profiling)
        self._backward: Backward | None = None
        if options.backward and self._profiling.by_node:
            self._backward = ByNode(self._profiling, self._spans)
        elif options.backward:
            self._backward = ByCall(self._profiling, framework)
        self._forward = options.forward
        self._calibration = CalibrationCalls(framework, self._profiling)
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self.handles: weakref.WeakSet[Annotation] = weakref.WeakSet()
        """A handle that nobody holds cannot be closed, and keeps nothing."""
        self.options = options
        self.count = len(sites)
        self.closed = False
        with ExitStack() as undo:  # a failure half-way takes back what was placed
            for site in sites:
                begun, over = partial(self._before, site), partial(self._after, site)
                undo.callback(framework.on_call(site.module, begun, over))
            self._undo = undo.pop_all()
        for site in sites:
            _annotated.put(site.module, weakref.ref(self))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._undo.close()
        if self._backward is not None:
            self._backward.close()
        for call in list(self._calls):
            for remove in call.removes:
                remove()
            call.removes.clear()
        self._spans.close_all()

    def _before(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any], span: str = "") -> None:
        if self._forward and self._spans.top() is None:
            self._calibration.run_once(self._before, self._after)
        replaying = self._framework.recomputing()
        if not replaying:
            # No backward is running, so an exception has left what is still open of one. The same holds of forwards
            # when the whole model starts anew: a KeyboardInterrupt closes no span.
            anew = not site.name and self._spans.in_forward() and not _running(site.owner)
            self._spans.close_while(lambda _, backward: backward or anew)
        with self._mark(BEFORE):
            call = Call(self.options.label(site), self._spans.top(), self._framework.mark(), [])
            if self._backward is not None and self._framework.records_gradients():
                inputs = open_arguments(args, kwargs, self._framework.is_tensor).tensors
                call.anchors = self._profiling.anchors(tensor for _, tensor in inputs)
        name = span or f"{'recompute' if replaying else 'forward'} {call.label}"
        self._spans.open(call, name if self._forward else None, site)

    def _after(self, site: Site, output: Any) -> None:
        call = self._spans.leave(site)
        if call is None:
            return
        with self._mark(AFTER):
            if output is not None and self._backward is not None and self._framework.records_gradients():
                tensors = [tensor for _, tensor in open_value(output, self._framework.is_tensor).tensors]
                self._backward.returned(call, tensors)
                if call.removes:
                    self._calls.add(call)
            call.anchors = []

    def _mark(self, name: str) -> AbstractContextManager[Any]:
        return self._profiling.mark(name) if self._forward else nullcontext()


def _running(module: Any) -> bool:
    """Whether this module's forward is on the Python stack: it may call itself."""
    code = getattr(type(module).forward, "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False

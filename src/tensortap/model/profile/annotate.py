"""Annotate modules in a profile: nested spans around every forward, backward and recomputation."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from tensortap.capture.messages import say
from tensortap.capture.modules.tree import Site, Tree
from tensortap.capture.selection import Selection
from tensortap.capture.watching.flatten import open_arguments, open_value
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework
from tensortap.frameworks.module_notes import ModuleNotes
from tensortap.frameworks.profiling import Profiling, profiling_of
from tensortap.model.profile.backward_spans import BackwardMarks, CallMoments, NodeSpans
from tensortap.model.profile.spans import AnnotatedCall, OpenSpans
from tensortap.times.marks import AFTER, BEFORE, CALIBRATION, IDLE

__all__ = ["Annotation", "annotate"]

_CALIBRATION_CALLS = 8
_BRACKETS = str.maketrans("()", "[]")


def annotate(
    model: Any,
    *,
    modules: str | Sequence[str] | Callable[[str, Any], bool] = "*",
    forward: bool = True,
    backward: bool = True,
    name: str = "",
) -> Annotation:
    """Put spans around the modules of a torch or paddle model until `close()` or the end of the `with` block.

    Spans are named `forward layers.0.fc1 (Linear)`, `backward …`, and `recompute …` for recomputation under activation
    checkpointing. Training stays bit-identical. `name` is prepended to the names of all modules, to distinguish several
    models in one profile. Annotating a model a second time adds nothing: its spans stay until both handles are closed.
    Raise UsageError if a module is already annotated with other options or as part of another model.

    >>> with tensortap.annotate(model), torch.profiler.profile() as prof:
    ...     model(x).sum().backward()
    >>> print(tensortap.module_times(prof))
    """
    if not (forward or backward):
        raise UsageError(
            "annotate: with forward=False and backward=False there is nothing to mark: leave one of them True"
        )
    model = network_of(model)
    framework = framework_of(model)
    selection = Selection(modules=modules)
    tree = Tree(framework, model)
    chosen = [site for site in tree.sites if selection.wants_module(site.name, site.cls, site.owner)]
    for text in selection.check_found(len(chosen), [s.name for s in tree.sites], {s.cls for s in tree.sites}):
        say(text)
    sites = [site for site in chosen if site.callable and site.inside is None]
    options = _AnnotateOptions(forward, backward, name)
    return Annotation(_find_placed(sites, options) or _SpanHooks(framework, sites, options))


@dataclass(frozen=True)
class _AnnotateOptions:
    forward: bool
    backward: bool
    name: str

    def label(self, site: Site) -> str:
        """Return `layers.0.fc1 (Linear)`. Readers take the class from the last parentheses."""
        module = ".".join(part for part in (self.name, site.name) if part)
        return f"{display_name(module)} ({site.cls.translate(_BRACKETS)})"


class Annotation:
    """The handle of one model's spans. Use it as a context manager, or call `close()`."""

    def __init__(self, hooks: _SpanHooks) -> None:
        self._hooks = hooks
        hooks.handles.add(self)

    def close(self) -> None:
        """Remove the spans, also from graphs whose backward is still to come.

        They stay while another handle of the same spans is open.
        """
        self._hooks.handles.discard(self)
        if not self._hooks.handles:
            self._hooks.close()

    def __enter__(self) -> Annotation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_annotated: ModuleNotes[weakref.ref[_SpanHooks]] = ModuleNotes()
"""The span hooks of each annotated module, which keeps them alive."""


def _find_placed(sites: Sequence[Site], options: _AnnotateOptions) -> _SpanHooks | None:
    """Return the hooks that are already on exactly these modules, or None.

    Raise UsageError if some of the modules have other hooks.
    """
    found = [(site, note()) for site in sites if (note := _annotated.get(site.module)) is not None]
    open_ones = [(site, hooks) for site, hooks in found if hooks is not None and not hooks.closed]
    if not open_ones:
        return None
    site, hooks = open_ones[0]
    same = len(open_ones) == len(sites) == hooks.count and all(each is hooks for _, each in open_ones)
    if same and hooks.options == options:
        return hooks
    raise UsageError(
        f"annotate: {display_name(site.name)} ({site.cls}) is already annotated, with other options or as part of "
        "another model. Close that annotation first: leave its `with` block or call its close()"
    )


class _SpanHooks:
    """The hooks that open and close the spans."""

    def __init__(self, framework: Framework, sites: Sequence[Site], options: _AnnotateOptions) -> None:
        self._framework = framework
        self._profiling = profiling_of(framework)
        self._spans = OpenSpans(self._profiling)
        self._backward: BackwardMarks | None = None
        if options.backward and self._profiling.by_node:
            self._backward = NodeSpans(self._profiling, self._spans)
        elif options.backward:
            self._backward = CallMoments(self._profiling, framework)
        self._forward = options.forward
        self._calibration = _CalibrationCalls(framework, self._profiling)
        self._calls: weakref.WeakSet[AnnotatedCall] = weakref.WeakSet()
        self.handles: weakref.WeakSet[Annotation] = weakref.WeakSet()
        """Open handles. They are weak: a handle without references can no longer be closed, so it must not count."""
        self.options = options
        self.count = len(sites)
        self.closed = False
        with ExitStack() as undo:  # a failure removes the hooks placed so far
            for site in sites:
                undo.callback(framework.on_call(site.module, partial(self._before, site), partial(self._after, site)))
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
            for remove in call.removers:
                remove()
            call.removers.clear()
        self._spans.close_all()

    def _before(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any], span: str = "") -> None:
        if self._forward and self._spans.top() is None:
            self._calibration.run_once(self._before, self._after)
        replaying = self._framework.recomputing()
        if not replaying:
            # No backward is running, so backward spans that are still open are left over from an exception. The same
            # holds for forward spans when the whole model starts again: a KeyboardInterrupt closes no span.
            restarted = not site.name and self._spans.in_forward() and not _is_running(site.owner)
            self._spans.close_while(lambda _, backward: backward or restarted)
        with self._mark(BEFORE):
            call = AnnotatedCall(self.options.label(site), self._spans.top(), self._framework.mark(), [])
            if self._backward is not None and self._framework.records_gradients():
                inputs = open_arguments(args, kwargs, self._framework.is_tensor).tensors
                call.anchors = self._profiling.anchors(tensor for _, tensor in inputs)
        name = span or f"{'recompute' if replaying else 'forward'} {call.label}"
        self._spans.open(call, name if self._forward else None, site)

    def _after(self, site: Site, output: Any) -> None:
        call = self._spans.close_innermost(site)
        if call is None:
            return
        with self._mark(AFTER):
            if output is not None and self._backward is not None and self._framework.records_gradients():
                tensors = [tensor for _, tensor in open_value(output, self._framework.is_tensor).tensors]
                self._backward.on_return(call, tensors)
                if call.removers:
                    self._calls.add(call)
            call.anchors = []

    def _mark(self, name: str) -> AbstractContextManager[Any]:
        return self._profiling.mark(name) if self._forward else nullcontext()


class _CalibrationCalls:
    """A few annotated calls of a module that does nothing, once per profile.

    They show the cost of annotating a call, so that `module_times` can subtract it.
    """

    def __init__(self, framework: Framework, profiling: Profiling) -> None:
        self._framework = framework
        self._profiling = profiling
        self._recording = False
        self._running = False

    def run_once(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Run the calls if a profiler has started to record since `run_once` was last called."""
        if self._running:
            return
        recording = self._profiling.recording()
        begun, self._recording = recording and not self._recording, recording
        module = self._profiling.idle_module() if begun else None
        if module is None:
            return
        site = Site("(idle)", type(module).__name__, module, module, None, "", True)
        remove = self._framework.on_call(module, partial(before, site, span=IDLE), partial(after, site))
        self._running = True
        try:
            with self._profiling.mark(CALIBRATION):
                for _ in range(_CALIBRATION_CALLS):
                    module()
        finally:
            self._running = False
            remove()


def _is_running(module: Any) -> bool:
    """Return whether this module's forward is on the Python stack: a module may call itself."""
    code = getattr(type(module).forward, "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False

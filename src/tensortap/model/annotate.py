"""Names the modules in a profile: nested spans around every forward, backward and recomputation."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from tensortap.capture.flatten import open_arguments, open_value
from tensortap.capture.selection import Selection
from tensortap.capture.tree import Site, Tree
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.profiling import profiling_of
from tensortap.model.backward_spans import Backward, ByCall, ByNode
from tensortap.model.spans import OVERHEAD, Call, Spans
from tensortap.records import shown

__all__ = ["Annotation", "annotate"]


def annotate(
    model: Any,
    *,
    modules: str | Sequence[str] | Callable[[str, Any], bool] = "*",
    forward: bool = True,
    backward: bool = True,
) -> Annotation:
    """Put spans around the modules of a torch or paddle model until `close()` or the end of the `with` block.

    They are named `forward layers.0.fc1 (Linear)`, `backward …`, and `recompute …` for what activation checkpointing
    runs again. No number changes.

    >>> with tensortap.annotate(model), torch.profiler.profile() as prof:
    ...     model(x).sum().backward()
    >>> print(tensortap.module_times(prof))
    """
    if not (forward or backward):
        raise UsageError("annotate: with forward=False and backward=False there is nothing to mark")
    return Annotation(model, Selection(modules=modules), forward, backward)


class Annotation:
    """The spans of one model. A context manager; or call `close()` when done."""

    def __init__(self, model: Any, selection: Selection, forward: bool, backward: bool) -> None:
        model = network_of(model)
        framework = framework_of(model)
        self._framework = framework
        self._profiling = profiling_of(framework)
        self._spans = Spans(self._profiling)
        self._backward: Backward | None = None
        if backward and self._profiling.by_node:
            self._backward = ByNode(self._profiling, self._spans)
        elif backward:
            self._backward = ByCall(self._profiling, framework)
        self._forward = forward
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._closed = False
        tree = Tree(framework, model)
        chosen = [s for s in tree.sites if selection.wants_module(s.name, s.cls, s.owner)]
        selection.check_found(len(chosen), [s.name for s in tree.sites], {s.cls for s in tree.sites})
        with ExitStack() as undo:  # a failure half-way takes back what was placed
            for site in chosen:
                if site.callable and site.inside is None:
                    begun, over = partial(self._before, site), partial(self._after, site)
                    undo.callback(framework.on_call(site.module, begun, over))
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Take everything back, also from graphs that still wait for their backward."""
        if self._closed:
            return
        self._closed = True
        self._undo.close()
        if self._backward is not None:
            self._backward.close()
        for call in list(self._calls):
            for remove in call.removes:
                remove()
            call.removes.clear()
        self._spans.close_all()

    def __enter__(self) -> Annotation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _before(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        replaying = self._framework.replaying()
        if not replaying:
            # No backward is running, so what is left of one was left by an exception. The same holds of forwards when
            # the whole model starts anew, which is how a KeyboardInterrupt is found: nobody tells the modules.
            anew = not site.name and self._spans.in_forward() and not _running(site.owner)
            self._spans.close_while(lambda _, backward: backward or anew)
        call = Call(f"{shown(site.name)} ({site.cls})", self._spans.top(), self._framework.mark(), [])
        if self._backward is not None and self._framework.records_gradients():
            inputs = open_arguments(args, kwargs, self._framework.is_tensor).tensors
            call.anchors = self._profiling.anchors(tensor for _, tensor in inputs)
        word = "recompute" if replaying else "forward"
        self._spans.open(call, word if self._forward else None, site)

    def _after(self, site: Site, output: Any) -> None:
        call = self._spans.leave(site)
        if call is None:
            return
        if output is not None and self._backward is not None and self._framework.records_gradients():
            span = self._profiling.begin(OVERHEAD) if self._forward else None
            tensors = [tensor for _, tensor in open_value(output, self._framework.is_tensor).tensors]
            self._backward.returned(call, tensors)
            if call.removes:
                self._calls.add(call)
            if span is not None:
                self._profiling.end(span)
        call.anchors = []


def _running(module: Any) -> bool:
    """Whether this module's forward is on the Python stack: it may call itself."""
    code = getattr(type(module).forward, "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False

"""Marks before and after a module's forward and backward, under the names that existing scripts look for.

The marks are moments in the profile, `before forward of Linear: head` and the like; `tensortap.annotate` gives whole
spans instead. Outputs and gradients are looked at and never replaced, and modules that work in place keep working.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeVar

from tensortap.capture.flatten import open_arguments, open_value
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework
from tensortap.frameworks.profiling import Profiling, profiling_of

__all__ = ["backward_hook_wrapper", "forward_hook_wrapper"]

M = TypeVar("M")


def forward_hook_wrapper(module: M, details: object = None) -> M:
    """Mark every forward of `module`: `before forward of {Class}: {details}`, `after forward of …`. Returns it.

    >>> model.head = forward_hook_wrapper(model.head, details="head")
    """
    network = network_of(module)
    framework = framework_of(network)
    profiling = profiling_of(framework)
    name = _name(network, details)

    def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        profiling.instant(f"before forward of {name}")

    def after(output: Any) -> None:
        profiling.instant(f"after forward of {name}")

    framework.on_call(network, before, after)
    return module


def backward_hook_wrapper(module: M, details: object = None) -> M:
    """Mark every backward of `module`: `before backward of {Class}: {details}`, `after backward of …`. Returns it.

    The first comes when gradient reaches the module; the second when the last of it has left, towards the inputs and
    the parameters, or at the latest when backward is over.
    """
    network = network_of(module)
    framework = framework_of(network)
    marks = _BackwardMarks(framework, profiling_of(framework), _name(network, details))
    framework.on_call(network, marks.called, marks.returned)
    return module


class _BackwardMarks:
    def __init__(self, framework: Framework, profiling: Profiling, name: str) -> None:
        self._framework = framework
        self._profiling = profiling
        self._name = name
        self._local = threading.local()

    def _open(self) -> list[tuple[int, list[Any]]]:
        """Calls on this thread that have not returned; a module may be inside itself."""
        calls: list[tuple[int, list[Any]]] = self._local.__dict__.setdefault("calls", [])
        return calls

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        inputs = open_arguments(args, kwargs, self._framework.is_tensor).tensors
        self._open().append((self._framework.mark(), self._profiling.anchors(tensor for _, tensor in inputs)))

    def returned(self, output: Any) -> None:
        mark, anchors = self._open().pop()
        if output is None or not self._framework.records_gradients():
            return
        outputs = [tensor for _, tensor in open_value(output, self._framework.is_tensor).tensors]
        if not self._profiling.by_node:
            call = _MarkedCall(self._profiling, self._name, len(anchors))
            for tensor in outputs:
                if not tensor.is_leaf:
                    self._framework.on_gradient(tensor, lambda _: call.arrived())
            for tensor in anchors:
                self._framework.on_gradient(tensor, lambda _: call.left())
            return
        nodes = self._profiling.nodes(outputs, anchors, mark)
        call = _MarkedCall(self._profiling, self._name, sum(found.last for found in nodes))
        for found in nodes:
            self._profiling.around_node(found.node, call.arrived, call.left if found.last else _nothing)


class _MarkedCall:
    """One call on its way back; begins anew if its graph is kept and run again."""

    def __init__(self, profiling: Profiling, name: str, ways_out: int) -> None:
        self._profiling = profiling
        self._name = name
        self._ways_out = ways_out
        self._waiting = 0
        self._inside = False
        self._done = False

    def arrived(self) -> None:
        if self._inside or self._done:
            return
        self._inside, self._waiting = True, self._ways_out
        self._profiling.at_backward_end(self._over)
        self._profiling.instant(f"before backward of {self._name}")

    def left(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._after()

    def _over(self) -> None:
        self._after()
        self._done = False

    def _after(self) -> None:
        if self._inside:
            self._inside, self._done = False, True
            self._profiling.instant(f"after backward of {self._name}")


def _nothing() -> None: ...


def _name(module: Any, details: object) -> str:
    name = type(module).__qualname__
    return f"{name}: {details}" if details else name

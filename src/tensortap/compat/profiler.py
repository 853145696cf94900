"""Mark the start and end of a module's forward and backward in a profile, under the names of existing scripts.

The marks are instants, such as `before forward of Linear: head`; `tensortap.annotate` adds whole spans instead. Outputs
and gradients are never replaced, and modules that work in place keep working.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tensortap.capture.modules.tree import Tree
from tensortap.capture.watching.flatten import open_arguments, open_value
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework, Remove
from tensortap.frameworks.module_notes import ModuleNotes
from tensortap.frameworks.profiling import Profiling, profiling_of

__all__ = ["backward_hook_wrapper", "forward_hook_wrapper", "remove_hook_wrappers"]

M = TypeVar("M")


def forward_hook_wrapper(module: M, details: object = None) -> M:
    """Mark every forward of `module`: `before forward of {Class}: {details}`, `after forward of …`. Return the module.

    A module has one such pair of marks: a second call only renames it. `remove_hook_wrappers` removes it.

    >>> model.head = forward_hook_wrapper(model.head, details="head")
    """
    network = network_of(module)
    framework = framework_of(network)
    _replace_marks(network, "forward", _ForwardMarks(framework, profiling_of(framework), _name(network, details)))
    return module


def backward_hook_wrapper(module: M, details: object = None) -> M:
    """Mark every backward of `module`: `before backward of {Class}: {details}`, `after backward of …`.

    Return the module. The first mark is set when gradient reaches the module. The second is set when the last gradient
    leaves it, towards inputs and parameters, or at the latest when backward ends. A module has one such pair of marks:
    a second call only renames it. `remove_hook_wrappers` removes it.
    """
    network = network_of(module)
    framework = framework_of(network)
    _replace_marks(network, "backward", _BackwardMarks(framework, profiling_of(framework), _name(network, details)))
    return module


def remove_hook_wrappers(model: Any) -> int:
    """Remove the marks of both wrappers from a module and from everything inside it.

    Graphs whose backward is still to come show no more marks. Return the number of wrappers removed.

    >>> remove_hook_wrappers(model)
    2
    """
    network = network_of(model)
    tree = Tree(framework_of(network), network)
    modules = [*tree.wrappers, *(each for site in tree.sites for each in (site.module, site.owner))]
    notes = [note for module in modules for note in (_placed.drop(module) or {}).values()]
    found = [marks for note in notes if (marks := note()) is not None]
    for marks in found:
        marks.close()
    return len(found)


def _replace_marks(module: Any, direction: str, marks: _ModuleMarks) -> None:
    """Place marks on a module, and remove those that it has in this direction."""
    known = _placed.get(module)
    if known is None:
        _placed.put(module, known := {})
    if (note := known.get(direction)) is not None and (earlier := note()) is not None:
        earlier.close()
    marks.place(module)
    known[direction] = weakref.ref(marks)


class _ModuleMarks:
    """Marks on one module in one direction. The module's hooks keep them alive."""

    def __init__(self, framework: Framework, profiling: Profiling, name: str) -> None:
        self._framework = framework
        self._profiling = profiling
        self._name = name
        self._closed = False
        self._remove: Remove | None = None

    def place(self, module: Any) -> None:
        self._remove = self._framework.on_call(module, self.on_call, self.on_return)

    def close(self) -> None:
        """Remove the hooks, and mark nothing more in graphs whose backward is still to come."""
        self._closed = True
        if self._remove is not None:
            self._remove()

    def on_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def on_return(self, output: Any) -> None:
        raise NotImplementedError


_placed: ModuleNotes[dict[str, weakref.ref[_ModuleMarks]]] = ModuleNotes()


class _ForwardMarks(_ModuleMarks):
    def on_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._profiling.instant(f"before forward of {self._name}")

    def on_return(self, output: Any) -> None:
        self._profiling.instant(f"after forward of {self._name}")


class _BackwardMarks(_ModuleMarks):
    def __init__(self, framework: Framework, profiling: Profiling, name: str) -> None:
        super().__init__(framework, profiling, name)
        self._local = threading.local()

    def mark(self, word: str) -> None:
        if not self._closed:
            self._profiling.instant(f"{word} backward of {self._name}")

    def at_backward_end(self, callback: Callable[[], None]) -> None:
        self._profiling.at_backward_end(callback)

    def _running_calls(self) -> list[tuple[int, list[Any]]]:
        """Return the running calls of this thread; a module may run inside itself."""
        calls: list[tuple[int, list[Any]]] = self._local.__dict__.setdefault("calls", [])
        return calls

    def on_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        inputs = open_arguments(args, kwargs, self._framework.is_tensor).tensors
        self._running_calls().append((self._framework.mark(), self._profiling.anchors(tensor for _, tensor in inputs)))

    def on_return(self, output: Any) -> None:
        mark, anchors = self._running_calls().pop()
        if output is None or not self._framework.records_gradients():
            return
        outputs = [tensor for _, tensor in open_value(output, self._framework.is_tensor).tensors]
        if not self._profiling.by_node:
            call = _MarkedCall(self, len(anchors))
            for tensor in outputs:
                if not tensor.is_leaf:
                    self._framework.on_gradient(tensor, lambda _: call.on_gradient())
            for tensor in anchors:
                self._framework.on_gradient(tensor, lambda _: call.on_exit())
            return
        nodes = self._profiling.nodes(outputs, anchors, mark)
        call = _MarkedCall(self, sum(found.last for found in nodes))
        for found in nodes:
            self._profiling.around_node(found.node, call.on_gradient, call.on_exit if found.last else _do_nothing)


class _MarkedCall:
    """The backward of one call. It starts again if the graph is retained and run again."""

    def __init__(self, marks: _BackwardMarks, exits: int) -> None:
        self._marks = marks
        self._exits = exits
        self._pending = 0
        self._inside = False
        self._done = False

    def on_gradient(self) -> None:
        if self._inside or self._done:
            return
        self._inside, self._pending = True, self._exits
        self._marks.at_backward_end(self._on_backward_end)
        self._marks.mark("before")

    def on_exit(self) -> None:
        self._pending -= 1
        if self._pending == 0:
            self._mark_after()

    def _on_backward_end(self) -> None:
        self._mark_after()
        self._done = False

    def _mark_after(self) -> None:
        if self._inside:
            self._inside, self._done = False, True
            self._marks.mark("after")


def _do_nothing() -> None: ...


def _name(module: Any, details: object) -> str:
    name = type(module).__qualname__
    return f"{name}: {details}" if details else name

"""Marks before and after a module's forward and backward, under the names that existing scripts look for.

The marks are moments in the profile, `before forward of Linear: head` and the like; `tensortap.annotate` gives whole
spans instead. Outputs and gradients are never replaced, and modules that work in place keep working.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tensortap.capture.flatten import open_arguments, open_value
from tensortap.capture.tree import Tree
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework, Remove
from tensortap.frameworks.module_notes import ModuleNotes
from tensortap.frameworks.profiling import Profiling, profiling_of

__all__ = ["backward_hook_wrapper", "forward_hook_wrapper", "remove_hook_wrappers"]

M = TypeVar("M")


def forward_hook_wrapper(module: M, details: object = None) -> M:
    """Mark every forward of `module`: `before forward of {Class}: {details}`, `after forward of …`. Return the module.

    A module has one such mark: a second call only renames it. `remove_hook_wrappers` takes it off.

    >>> model.head = forward_hook_wrapper(model.head, details="head")
    """
    network = network_of(module)
    framework = framework_of(network)
    _place(network, "forward", _ForwardMarks(framework, profiling_of(framework), _name(network, details)))
    return module


def backward_hook_wrapper(module: M, details: object = None) -> M:
    """Mark every backward of `module`: `before backward of {Class}: {details}`, `after backward of …`.

    Return the module. The first mark comes when gradient reaches the module. The second comes when the last gradient
    has left it, towards the inputs and the parameters, or at the latest when backward is over. A module has one such
    pair of marks: a second call only renames it. `remove_hook_wrappers` takes it off.
    """
    network = network_of(module)
    framework = framework_of(network)
    _place(network, "backward", _BackwardMarks(framework, profiling_of(framework), _name(network, details)))
    return module


def remove_hook_wrappers(model: Any) -> int:
    """Remove the marks of both wrappers from a module and from everything inside it.

    Graphs that still wait for their backward show no marks any more. Return how many wrappers were removed.

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


def _place(module: Any, direction: str, marks: _Marks) -> None:
    """Put marks on a module in the place of those that it has in this direction."""
    known = _placed.get(module)
    if known is None:
        _placed.put(module, known := {})
    if (note := known.get(direction)) is not None and (earlier := note()) is not None:
        earlier.close()
    marks.place(module)
    known[direction] = weakref.ref(marks)


class _Marks:
    """Marks on one module in one direction. The module's hooks keep them alive."""

    def __init__(self, framework: Framework, profiling: Profiling, name: str) -> None:
        self._framework = framework
        self._profiling = profiling
        self._name = name
        self._closed = False
        self._remove: Remove | None = None

    def place(self, module: Any) -> None:
        self._remove = self._framework.on_call(module, self.called, self.returned)

    def close(self) -> None:
        """Remove the hooks, and show nothing of calls whose backward is still to come."""
        self._closed = True
        if self._remove is not None:
            self._remove()

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def returned(self, output: Any) -> None:
        raise NotImplementedError


_placed: ModuleNotes[dict[str, weakref.ref[_Marks]]] = ModuleNotes()


class _ForwardMarks(_Marks):
    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._profiling.instant(f"before forward of {self._name}")

    def returned(self, output: Any) -> None:
        self._profiling.instant(f"after forward of {self._name}")


class _BackwardMarks(_Marks):
    def __init__(self, framework: Framework, profiling: Profiling, name: str) -> None:
        super().__init__(framework, profiling, name)
        self._local = threading.local()

    def show(self, word: str) -> None:
        if not self._closed:
            self._profiling.instant(f"{word} backward of {self._name}")

    def at_backward_end(self, callback: Callable[[], None]) -> None:
        self._profiling.at_backward_end(callback)

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
            call = _MarkedCall(self, len(anchors))
            for tensor in outputs:
                if not tensor.is_leaf:
                    self._framework.on_gradient(tensor, lambda _: call.arrived())
            for tensor in anchors:
                self._framework.on_gradient(tensor, lambda _: call.left())
            return
        nodes = self._profiling.nodes(outputs, anchors, mark)
        call = _MarkedCall(self, sum(found.last for found in nodes))
        for found in nodes:
            self._profiling.around_node(found.node, call.arrived, call.left if found.last else _nothing)


class _MarkedCall:
    """One call on its way back; begins anew if its graph is kept and run again."""

    def __init__(self, marks: _BackwardMarks, ways_out: int) -> None:
        self._marks = marks
        self._ways_out = ways_out
        self._waiting = 0
        self._inside = False
        self._done = False

    def arrived(self) -> None:
        if self._inside or self._done:
            return
        self._inside, self._waiting = True, self._ways_out
        self._marks.at_backward_end(self._over)
        self._marks.show("before")

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
            self._marks.show("after")


def _nothing() -> None: ...


def _name(module: Any, details: object) -> str:
    name = type(module).__qualname__
    return f"{name}: {details}" if details else name

"""Opens the arguments and outputs of a module by the structure that they had in its previous call.

A module is called with the same structure in every step: the same keywords, the same switches, tensors in the same
places. Checking that takes a tenth of the time of opening anew. Everything derived from the structure, such as paths
and slots, is reused. A value that differs is opened as if there had been no call before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tensortap.capture.watching.flatten import Opened, open_arguments, open_value
from tensortap.capture.watching.template_nodes import SINGLE_TENSOR, Node, NodeBuilder, collect
from tensortap.core.arguments import written
from tensortap.core.interrupts import raise_interrupt
from tensortap.frameworks.base import Framework

__all__ = ["Template", "TemplateOpener", "one_value"]

_MOST_MISSES = 64
"""Number of values that differ from their template before a module counts as one whose calls never repeat."""
_MOST_CALLS = 256
"""Upper bound on calls of one template for which anything is kept: a step that never ends must not grow for ever."""


class Template:
    """The structure of a value, and what its readers keep with it. It holds no object of the user's."""

    __slots__ = ("_by_call", "_node", "arguments", "closed", "paths", "text")

    def __init__(self, node: Node, opened: Opened, arguments: Mapping[str, Any]) -> None:
        self._node = node
        self.paths = [path for path, _ in opened.tensors]
        self.closed = opened.closed
        self.arguments = arguments
        """The plain values in the form in which a run keeps them."""
        self.text = repr(arguments)  # distinguishes True from 1, and takes half as long as JSON
        self._by_call: dict[Any, Any] = {}

    def of_call(self, call: Any, make: Callable[[Sequence[str]], Any]) -> Any:
        """Return the data kept for a call; `make` makes it from the paths."""
        if (found := self._by_call.get(call)) is None:
            if len(self._by_call) == _MOST_CALLS:
                self._by_call.clear()
            found = self._by_call[call] = make(self.paths)
        return found

    def tensors(self, value: Any, plain_tensors: Collection[type]) -> list[Any] | None:
        """Return the tensors of a value in the order of `paths`; None if its structure is another one."""
        if self._node is SINGLE_TENSOR:
            return [value] if type(value) in plain_tensors else None
        found: list[Any] = []
        return found if collect(value, self._node, plain_tensors, found.append) else None

    def has_tensors_of(self, opened: Opened) -> bool:
        """Return whether an opened value has its tensors at the same paths, and the same types that are not opened."""
        return self.paths == [path for path, _ in opened.tensors] and self.closed == opened.closed

    def opened(self, value: Any, plain_tensors: Collection[type]) -> Opened | None:
        """Open a value; None if its structure is another one."""
        if (tensors := self.tensors(value, plain_tensors)) is None:
            return None
        tensors_by_path = list(zip(self.paths, tensors, strict=True))
        return Opened(tensors_by_path, self.closed, template=self, arguments=self.arguments)


class TemplateOpener:
    """Opens the arguments or the outputs of one module. A run keeps plain values of arguments only."""

    __slots__ = ("_builder", "_framework", "_misses", "_template")

    def __init__(self, framework: Framework, *, arguments: bool) -> None:
        self._framework = framework
        self._builder = NodeBuilder(framework, plain_values=arguments)
        self._template: Template | None = None
        self._misses = 0

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Opened:
        """Open the arguments of a call."""
        value = one_value(args, kwargs, self._framework.plain_tensors)
        if (found := self._as_before(value)) is not None:
            return found
        opened = open_arguments(args, kwargs, self._framework.is_tensor)
        return self._learned(value, opened, written(opened.plain, self._framework.opaque_value))

    def output(self, value: Any) -> Opened:
        """Open an output."""
        if (found := self._as_before(value)) is not None:
            return found
        return self._learned(value, open_value(value, self._framework.is_tensor), {})

    def _as_before(self, value: Any) -> Opened | None:
        return None if self._template is None else self._template.opened(value, self._framework.plain_tensors)

    def _learned(self, value: Any, opened: Opened, arguments: Mapping[str, Any]) -> Opened:
        opened.arguments = arguments
        before = self._template
        # Other plain values are no miss: a plan only takes note of them.
        self._misses += before is None or not before.has_tensors_of(opened)
        if self._misses <= _MOST_MISSES:
            try:
                node = self._builder.node_of(value)
            except Exception as error:  # the value's own code runs here
                raise_interrupt(error)
                node = None
            self._template = opened.template = None if node is None else Template(node, opened, arguments)
        return opened


def one_value(args: tuple[Any, ...], kwargs: Mapping[str, Any], plain_tensors: Collection[type]) -> Any:
    """Return arguments as one value: most calls have a single tensor."""
    return args[0] if len(args) == 1 and not kwargs and type(args[0]) in plain_tensors else (args, kwargs)

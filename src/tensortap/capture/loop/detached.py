"""Notes which inputs and outputs autograd does not reach: a gradient that never comes was cut off before or after.

The notes become the loop fact `detached` of a module, at the end of each step in which it differs from the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensortap.capture.modules.tree import Site
from tensortap.capture.watching.clock import ModuleCall
from tensortap.frameworks.base import Framework

__all__ = ["DetachedValues"]

WriteFact = Callable[[int, str, str, Mapping[str, Any]], None]
"""See `RankWriter.loop_fact`."""


class DetachedValues:
    """Collects values that autograd does not reach, by module, over the calls of a step."""

    def __init__(self, framework: Framework, write: WriteFact) -> None:
        self._framework = framework
        self._write = write
        self._found: dict[str, dict[str, dict[str, None]]] = {}
        """By module and list: paths in the order in which they came. Modules without any have an empty entry."""
        self._written: dict[str, str] = {}

    def entered(self, site: Site, call: ModuleCall, paths: Sequence[str], reached: Sequence[bool]) -> None:
        """Note the inputs of a call that begins, and whether autograd reaches each."""
        if not call.autograd or call.recomputed:
            return
        found = self._found.setdefault(site.name, {})
        call.reached = any(reached)
        if detached := [path for path, reaches in zip(paths, reached, strict=True) if not reaches]:
            found.setdefault("inputs", {}).update(dict.fromkeys(detached))

    def left(self, site: Site, call: ModuleCall, paths: Sequence[str], reached: Sequence[bool]) -> None:
        """Note the outputs of a call that ends, and whether autograd reaches each."""
        if not call.autograd or call.recomputed:
            return
        if detached := [path for path, reaches in zip(paths, reached, strict=True) if not reaches]:
            requires_gradient = self._framework.requires_gradient
            inside = call.reached or any(requires_gradient(own) for _, own in self._framework.parameters(site.owner))
            name = "outputs" if inside else "outputs_of_detached"
            self._found.setdefault(site.name, {}).setdefault(name, {}).update(dict.fromkeys(detached))

    def end_step(self, step: int) -> None:
        """Write what differs from the step before."""
        for module, found in self._found.items():
            text = repr(found)
            if self._written.get(module, "{}") != text:
                self._written[module] = text
                self._write(step, "detached", module, {name: list(paths) for name, paths in found.items()})
        self._found.clear()

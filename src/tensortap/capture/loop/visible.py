"""Sketches of values without the positions that a mask hides, where the model is given such a mask.

Two kinds of attention return other values at positions that see nothing, such as padding before a text, and no loss
reads these. A summary mixes all positions, so that this difference hides a mistake elsewhere. A second sketch, over the
other positions alone, shows it. The first recorded step has one for each input and output with the axes of the mask,
and for the gradients that enter the model: what code computes is the same in later steps. They become the loop fact
`visible` of a module. Tensors on a device are left out: reading them would make the host wait.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy.typing as npt

from tensortap.core.interrupts import suppress_errors
from tensortap.frameworks.base import Framework, Identity
from tensortap.kernels import summarize
from tensortap.kernels.summary.probe import probe
from tensortap.kernels.summary.visible import COPIES, Positions, along, in_copies, sketch_of_visible

__all__ = ["VisibleValues"]

WriteFact = Callable[[int, str, str, Mapping[str, Any]], None]
"""See `RankWriter.loop_fact`."""


class VisibleValues:
    """Collects these sketches over the first recorded step."""

    def __init__(self, framework: Framework, write: WriteFact) -> None:
        self._framework = framework
        self._write = write
        self._hidden: dict[int, list[Positions]] = {}
        """By micro step: what the masks hide that the model is given."""
        self._found: dict[str, dict[str, str]] = {}
        self._known: dict[Hashable, tuple[Identity, bytes, str]] = {}
        """Sketches of tensors that the step has shown."""
        self._over = False

    def begins(self, micro: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Look for masks among the inputs of a call that opens a micro step."""
        if self._over:
            return
        with suppress_errors():
            masks = [self._framework.host(each) for path, each in tensors if "mask" in path and self._is_here(each)]
            hidden = [each == 0 for each in masks if each.ndim == 2 and each.dtype.kind in "biu"]
            if found := [each for each in hidden if each.any()]:
                self._hidden[micro] = found
                self._found.setdefault("", {})[f"{micro}.hidden"] = " ".join(map(_digest, found))

    def seen(self, module: str, micro: int, call: int, kind: str, tensors: Iterable[tuple[str, Any]]) -> None:
        """Take values of a call, or a gradient at its outputs."""
        if self._over or micro not in self._hidden:
            return
        with suppress_errors():
            for path, tensor in tensors:
                if self._is_here(tensor) and (text := self._sketch(tensor, self._hidden[micro])):
                    self._found.setdefault(module, {})[f"{micro}.{call}.{kind}.{path}"] = text

    def end_step(self, step: int) -> None:
        """Write what was found in the first step, and take nothing from then on."""
        for module, found in self._found.items():
            self._write(step, "visible", module, found)
        self._found, self._known, self._hidden, self._over = {}, {}, {}, True

    def _is_here(self, tensor: Any) -> bool:
        return self._framework.device_reader(tensor) is None and not self._framework.unreadable(tensor)

    def _sketch(self, tensor: Any, hidden: list[Positions]) -> str:
        """Return the sketch of a tensor as text; empty if it does not have the axes of a mask."""
        array = self._framework.host(tensor)
        if array.ndim < 2 or array.dtype.kind == "b":
            return ""
        identity, sample = self._framework.identity(tensor), probe(array)
        if identity is not None and (known := self._known.get(identity.token)) is not None:
            before, same, text = known
            if before.alive() and same == sample:
                return text
        text = _sketch_as_text(array, hidden)
        if identity is not None:
            self._known[identity.token] = identity, sample, text
        return text


def _sketch_as_text(array: npt.NDArray[Any], hidden: list[Positions]) -> str:
    """Return the sketch; after COPIES if the array may hold several copies of all positions; empty if there is none."""
    for find, mark in ((along, ""), (in_copies, COPIES)):
        for positions in hidden:
            if (where := find(positions, array.shape)) is not None:
                return mark + b64encode(sketch_of_visible(array, where).astype("<f4").tobytes()).decode()
    return ""


def _digest(hidden: Positions) -> str:
    return f"{summarize(hidden).digest:016x}"

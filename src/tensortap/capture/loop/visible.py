"""Sketches of values without the positions that a mask hides, where the model is given such a mask.

Two kinds of attention return other values at positions that see nothing, such as padding, and no loss
reads these. A summary mixes all positions, so that this difference hides a mistake elsewhere. A second sketch, over the
other positions alone, shows it. Only the first recorded step has such sketches: later steps run the same code. It has
one for each input and output with the axes of the mask, and for the gradients that enter the model. They become the
loop fact `visible` of a module. Tensors on a device are sketched there, and the host waits for all of them once.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core.interrupts import suppress_errors
from tensortap.frameworks.base import Framework, Identity
from tensortap.frameworks.device_reader import VisibleSketches
from tensortap.kernels import summarize
from tensortap.kernels.summary.probe import probe
from tensortap.kernels.summary.visible import (
    COPIES,
    Positions,
    along,
    folded,
    in_copies,
    padding_of_texts,
    sketch_of_visible,
)

__all__ = ["VisibleValues"]

WriteFact = Callable[[int, str, str, Mapping[str, Any]], None]
"""See `RankWriter.loop_fact`."""


class VisibleValues:
    """Collects sketches of visible values over the first recorded step."""

    def __init__(self, framework: Framework, write: WriteFact) -> None:
        self._framework = framework
        self._write = write
        self._hidden: dict[int, list[Positions]] = {}
        """By micro step: the positions that the model's masks hide."""
        self._found: dict[str, dict[str, _Sketch]] = {}
        self._known: dict[Hashable, tuple[Identity, bytes, _Sketch | None]] = {}
        """Sketches of tensors that the step has shown."""
        self._on_device: VisibleSketches | None = None
        self._over = False

    def begins(self, micro: int, tensors: Iterable[tuple[str, Any]], module: Any) -> None:
        """Look for masks among the inputs of a call of `module` that opens a micro step."""
        if self._over:
            return
        with suppress_errors():
            names = {str(place): name for place, name in enumerate(signature(module.forward).parameters)}
            known = [(names.get(path, path), each) for path, each in tensors if self._is_readable(each)]
            masks = [each for name, each in known if "mask" in name and len(self._framework.local_shape(each)) == 2]
            others = [each for name, each in known if "mask" not in name and _is_boolean(each)]
            flags = [each for each in map(self._framework.host, masks) if each.dtype.kind in "biu"]
            padding = map(padding_of_texts, map(self._framework.host, others))
            if found := [*(each == 0 for each in flags if (each == 0).any()), *(p for p in padding if p is not None)]:
                self._hidden[micro] = found
                own = self._found.setdefault("", {})
                own[f"{micro}.hidden"] = _Sketch(" ".join(map(_digest, found)))
                if not any(each[:, 0].any() for each in found):
                    own[f"{micro}.behind"] = _Sketch("padding is behind its texts")

    def seen(self, module: str, micro: int, call: int, kind: str, tensors: Iterable[tuple[str, Any]]) -> None:
        """Sketch values of a call, or a gradient at its outputs."""
        if self._over or micro not in self._hidden:
            return
        with suppress_errors():
            for path, tensor in tensors:
                if self._is_readable(tensor) and (sketch := self._sketch(tensor, self._hidden[micro])) is not None:
                    self._found.setdefault(module, {})[f"{micro}.{call}.{kind}.{path}"] = sketch

    def end_step(self, step: int) -> None:
        """Write what was found in the first step, and take nothing from then on."""
        with suppress_errors():
            there = [] if self._on_device is None else [_as_text(folded(each)) for each in self._on_device.fetch()]
            for module, found in self._found.items():
                self._write(step, "visible", module, {name: sketch.text(there) for name, sketch in found.items()})
        self._found, self._known, self._hidden, self._over = {}, {}, {}, True
        self._on_device = None

    def _is_readable(self, tensor: Any) -> bool:
        return not self._framework.unreadable(tensor)

    def _sketch(self, tensor: Any, hidden: list[Positions]) -> _Sketch | None:
        """Return the sketch of a tensor; None if it does not have the axes of a mask."""
        here = self._framework.device_reader(tensor) is None
        if len(self._framework.local_shape(tensor)) < 2:
            return None
        identity, sample = self._framework.identity(tensor), probe(self._framework.host(tensor)) if here else b""
        if identity is not None and (known := self._known.get(identity.token)) is not None:
            before, same, sketch = known
            if before.alive() and same == sample:
                return sketch
        sketch = self._sketch_here(tensor, hidden) if here else self._sketch_there(tensor, hidden)
        if identity is not None:
            self._known[identity.token] = identity, sample, sketch
        return sketch

    def _sketch_here(self, tensor: Any, hidden: list[Positions]) -> _Sketch | None:
        array = self._framework.host(tensor)
        mark, where = _hidden_in(array.shape, hidden)
        if where is None or array.dtype.kind == "b":
            return None
        return _Sketch(mark + _as_text(sketch_of_visible(array, where)))

    def _sketch_there(self, tensor: Any, hidden: list[Positions]) -> _Sketch | None:
        if self._on_device is None:
            self._on_device = self._framework.visible_sketches()
        mark, where = _hidden_in(self._framework.local_shape(tensor), hidden)
        if where is None or self._on_device is None:
            return None
        number = self._on_device.add(tensor, where)
        return None if number is None else _Sketch(mark, number)


def _is_boolean(tensor: Any) -> bool:
    return str(getattr(tensor, "dtype", "")).endswith("bool")


class _Sketch(NamedTuple):
    """The text of a sketch, or its beginning and the number of a sketch on a device."""

    beginning: str
    number: int | None = None

    def text(self, there: Sequence[str]) -> str:
        return self.beginning if self.number is None else self.beginning + there[self.number]


def _hidden_in(shape: tuple[int, ...], hidden: list[Positions]) -> tuple[str, Positions | None]:
    """Return the hidden positions in a shape, after COPIES if it may hold several copies of all positions."""
    for find, mark in ((along, ""), (in_copies, COPIES)):
        for positions in hidden:
            if (where := find(positions, shape)) is not None:
                return mark, where
    return "", None


def _as_text(sketch: npt.NDArray[np.float32]) -> str:
    return b64encode(sketch.astype("<f4").tobytes()).decode()


def _digest(hidden: Positions) -> str:
    return f"{summarize(hidden).digest:016x}"

"""The calls of one peeked module, and the tensors of each call as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.model.peek import KINDS
from tensortap.model.peek.histogram import BINS, ValueHistogram, value_histogram
from tensortap.report.wording import dtype, nbytes, plural, shape

__all__ = ["PeekedCall", "PeekedModule", "PeekedTensors"]

Array = npt.NDArray[Any]
_LABEL = 14
"""Width of most labels, so that calls look alike."""


class PeekedTensors(dict[str, Array]):
    """The tensors of one kind in one call by path ("0", "mask", "past.0.k"), in the order of the arguments."""

    def __init__(self, call: PeekedCall, kind: str) -> None:
        super().__init__()
        self._call = call
        self._kind = kind

    def __missing__(self, path: str) -> Array:
        raise UsageError(self._call.explain_missing(self._kind, path))


class PeekedCall:
    """One call of a module. `input`, `output`, `grad_input` and `grad_output` are arrays by path."""

    def __init__(self, module: PeekedModule, number: int) -> None:
        self.number = number
        """Number of the call, from 1, as in the printed lines."""
        self._module = module
        self._arrays: dict[str, dict[str, Array]] = {kind: {} for kind in KINDS}
        self._too_large: dict[tuple[str, str], int] = {}
        self._dropped = False
        self.nbytes = 0
        """Bytes of all its arrays."""

    @property
    def input(self) -> PeekedTensors:
        return self.tensors("input")

    @property
    def output(self) -> PeekedTensors:
        return self.tensors("output")

    @property
    def grad_input(self) -> PeekedTensors:
        return self.tensors("grad_input")

    @property
    def grad_output(self) -> PeekedTensors:
        return self.tensors("grad_output")

    def tensors(self, kind: str) -> PeekedTensors:
        """Return the tensors of a kind; raise UsageError if the values of this call were dropped."""
        if kind not in KINDS:
            raise UsageError(f"kind: {kind!r} does not flow through a module; choose from {', '.join(KINDS)}")
        if self._dropped:
            raise UsageError(self.explain_missing(kind))
        result, arrays = PeekedTensors(self, kind), self._arrays[kind]
        order = list(self._arrays[kind.removeprefix("grad_")])  # gradients come back in any order
        result.update(sorted(arrays.items(), key=lambda each: order.index(each[0]) if each[0] in order else len(order)))
        return result

    def explain_missing(self, kind: str, path: str | None = None) -> str:
        """Return why this call has no such tensor, and what to do."""
        what, max_memory = f"{self._module.shown}, call {self.number}", self._module.max_memory
        if self._dropped:
            return (
                f"{what}: its values were dropped to make room for newer ones within max_memory={max_memory}; raise "
                "it, or peek at fewer modules"
            )
        large = [(each, size) for each, size in self._too_large.items() if each[0] == kind and path in (None, each[1])]
        if large:
            (_, where), size = large[0]
            return f"{what}: {kind} {where} has {nbytes(size)} and does not fit into max_memory={max_memory}; raise it"
        if kind not in self._module.kinds:
            return f"{what}: this peek does not include {kind}; its kinds are {', '.join(self._module.kinds)}"
        if self._arrays[kind]:
            return f"{what} has no {kind} {path!r}; it has {', '.join(map(repr, self._arrays[kind]))}"
        if self._module.remark:
            return f"{what} has no {kind}: {self._module.remark}"
        if kind.startswith("grad_"):
            return f"{what} has no {kind}: backward has not reached it yet, or the tensor takes no gradient"
        return f"{what} has no {kind}: the call got or returned no tensor"

    def add(self, kind: str, path: str, array: Array) -> None:
        self._arrays[kind][self._unused_path(kind, path)] = array
        self.nbytes += array.nbytes

    def skip(self, kind: str, path: str, size: int) -> None:
        self._too_large[kind, path] = size

    def drop(self) -> int:
        """Discard all values; return the bytes freed."""
        for arrays in self._arrays.values():
            arrays.clear()
        freed, self.nbytes, self._dropped = self.nbytes, 0, True
        return freed

    @property
    def dropped(self) -> bool:
        return self._dropped

    def __repr__(self) -> str:
        head = f"{self._module.shown}, call {self.number}"
        if self._dropped:
            return f"{head}: values dropped"
        found = {f"{kind} {path}": array for kind in KINDS for path, array in self.tensors(kind).items()}
        width = max([_LABEL, *map(len, found)])
        lines = [
            f"  {label:{width}} {dtype(dtypes.name_of(array.dtype))} {shape(array.shape)}"
            for label, array in found.items()
        ]
        return "\n".join([head, *(lines or ["  no tensor"])])

    def _unused_path(self, kind: str, path: str) -> str:
        """Return the path, with a number if it is taken: a second backward through one graph repeats paths."""
        number, free = 1, path
        while free in self._arrays[kind]:
            number += 1
            free = f"{path}~{number}"
        return free


@dataclass(eq=False, repr=False)
class PeekedModule:
    """The recorded calls of one module.

    `input`, `output`, `grad_input` and `grad_output` are the first tensor of that kind in the last call. `calls` has
    all calls and tensors.

    >>> p["conv2"].output.mean()                                               # doctest: +SKIP
    >>> p["conv2"].calls[0].input["mask"]                                      # doctest: +SKIP
    """

    name: str
    cls: str
    kinds: Sequence[str]
    max_memory: int
    calls: list[PeekedCall] = field(default_factory=list)
    remark: str = ""
    """Why values are missing, if any are."""

    @property
    def shown(self) -> str:
        return display_name(self.name)

    @property
    def input(self) -> Array:
        return self._first("input")

    @property
    def output(self) -> Array:
        return self._first("output")

    @property
    def grad_input(self) -> Array:
        return self._first("grad_input")

    @property
    def grad_output(self) -> Array:
        return self._first("grad_output")

    def histogram(
        self, kind: str = "output", *, path: str | None = None, call: int = -1, bins: int = BINS
    ) -> ValueHistogram:
        """Count the finite elements of a tensor in bins.

        kind: input, output, grad_input or grad_output.
        path: path of the tensor; None is the first of that kind.
        call: index into `calls`; -1 is the last.
        bins: number of bins. They are equally wide, or equally wide in the logarithm if there are outliers.

        >>> counts, edges = p["conv2"].histogram("output")                     # doctest: +SKIP
        >>> print(p["conv2"].histogram("grad_output"))                         # doctest: +SKIP
        """
        chosen = self._call(call)
        tensors = chosen.tensors(kind)
        if path is None:
            path = next(iter(tensors), None)
            if path is None:
                raise UsageError(chosen.explain_missing(kind))
        return value_histogram(tensors[path], f"{self.shown} · {kind} {path} · call {chosen.number}", bins)

    def __repr__(self) -> str:
        if not self.calls:
            return f"{self.shown} ({self.cls}): {self.remark or 'has not run yet'}"
        return f"{self.shown} ({self.cls}), {plural(len(self.calls), 'call')}; the last one:\n" + "\n".join(
            repr(self.calls[-1]).splitlines()[1:] or ["  values dropped"]
        )

    def _first(self, kind: str) -> Array:
        call = self._call(-1)
        tensors = call.tensors(kind)
        if not tensors:
            raise UsageError(call.explain_missing(kind))
        return next(iter(tensors.values()))

    def _call(self, index: int) -> PeekedCall:
        if not self.calls:
            raise UsageError(f"{self.shown} {self.remark or 'has not run yet: run the model, then read its values'}")
        if not -len(self.calls) <= index < len(self.calls):
            raise UsageError(f"{self.shown} has {plural(len(self.calls), 'call')}, and none at index {index}")
        return self.calls[index]

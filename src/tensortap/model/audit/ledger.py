"""The summary of every parameter and buffer of a model at the last look, and which have changed since."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensortap.capture.tree import Tree
from tensortap.core.records import Summary
from tensortap.frameworks.base import Framework, Identity
from tensortap.frameworks.loading import few_elements
from tensortap.frameworks.registered import Registration, registered
from tensortap.kernels import summarize
from tensortap.kernels.summary.reference import sketch_distance
from tensortap.report.wording import shape

__all__ = ["Change", "TensorSnapshots"]


@dataclass(slots=True, eq=False)
class _Known:
    identity: Identity | None
    few: bytes
    shape: tuple[int, ...]
    dtype: str
    summary: Summary | None
    """None while there are no elements to look at: a meta tensor, a lazy parameter."""


@dataclass(frozen=True, slots=True)
class Change:
    """How a tensor differs from the last look."""

    rel_l2: float = math.nan
    """|new - old| / |old|, from the sketches. NaN if there is no old value, or if it says nothing: the old values were
    all zero, or the tensor is a counter."""
    l2: float = math.nan
    """|new - old|; NaN if there is no old value."""
    detail: str = ""
    made: bool = False
    """It had no elements before."""


class TensorSnapshots:
    """Knows tensors by their names in the model, so that a replaced one is still the same entry."""

    def __init__(self, framework: Framework, model: Any) -> None:
        self._framework = framework
        self._model = model
        self._known: dict[str, _Known] = {}
        self.registrations: dict[str, Registration] = {}
        self.look(thorough=True)

    @property
    def names(self) -> list[str]:
        return list(self._known)

    def tensors(self) -> Iterator[tuple[str, Registration, Any]]:
        """Yield (name, registration, tensor) of all tensors that the model has now; a tied one under each name."""
        for site in Tree(self._framework, self._model).sites:
            prefix = f"{site.name}." if site.name else ""
            for name, tensor, registration in registered(self._framework, site.owner):
                yield prefix + name, registration, tensor

    def forget(self) -> None:
        """Let go of the model. What was known stays known."""
        self._model = None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._known[name].shape

    def summary(self, name: str) -> Summary | None:
        """The tensor's summary at the last look; None while it has no elements."""
        return self._known[name].summary

    def look(self, thorough: bool) -> dict[str, Change]:
        """Compare all tensors with the last look.

        Without `thorough` a tensor in the same memory, with the same version and the same few elements passes for
        unchanged; frameworks do not count what is changed behind autograd's back (`weight.data[3] = 0`).
        """
        changed: dict[str, Change] = {}
        seen: dict[int, _Known] = {}  # tied tensors are looked at once
        for name, registration, tensor in self.tensors():
            self.registrations[name] = registration
            old = self._known.get(name)
            new = seen.get(id(tensor)) or self._state(tensor, old, thorough)
            seen[id(tensor)] = new
            self._known[name] = new
            if old is not None and (change := _difference(old, new)) is not None:
                changed[name] = change
            elif old is None:
                changed[name] = Change(made=True)
        return changed

    def _state(self, tensor: Any, old: _Known | None, thorough: bool) -> _Known:
        framework = self._framework
        dtype = str(tensor.dtype).rpartition(".")[2]
        if reason := framework.unreadable(tensor):
            # A lazy parameter has no shape, and says so by raising.
            return _Known(None, b"", () if "initialised" in reason else tuple(tensor.shape), dtype, None)
        sizes = tuple(int(size) for size in tensor.shape)
        identity = framework.identity(tensor)
        few = few_elements(framework, tensor)
        if old is not None and not thorough and _same(old.identity, identity) and few == old.few:
            return old
        array = framework.host(tensor)
        summary = summarize(array)
        if old is not None and old.summary is not None and (old.shape, old.dtype) == (sizes, dtype):
            # Looks at the same values share one summary.
            summary = old.summary if old.summary.digest == summary.digest else summary
        return _Known(identity, few, sizes, dtype, summary)


def _same(old: Identity | None, new: Identity | None) -> bool:
    return old is not None and new is not None and old.token == new.token and old.alive()


def _difference(old: _Known, new: _Known) -> Change | None:
    if old is new:
        return None
    if old.shape != new.shape:
        return Change(detail=f"{shape(old.shape)} became {shape(new.shape)}", made=old.summary is None)
    if old.summary is None or new.summary is None:
        return Change(made=True) if old.summary is None and new.summary is not None else None
    if old.dtype == new.dtype and old.summary.digest == new.summary.digest:
        return None
    gap = sketch_distance(old.summary, new.summary)
    counter = new.summary.elements == 1 and "int" in new.dtype
    detail = f"{old.dtype} became {new.dtype}" if old.dtype != new.dtype else ""
    if new.summary.nonfinite and not old.summary.nonfinite:
        detail = "; ".join(filter(None, (detail, "not all finite any more")))
    return Change(gap / old.summary.l2 if old.summary.l2 and not counter else math.nan, gap, detail)

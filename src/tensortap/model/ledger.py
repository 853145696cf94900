"""What every parameter and buffer of a model looked like at the last look, and which have changed since."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensortap.capture.tree import Tree
from tensortap.frameworks.base import Framework, Identity
from tensortap.frameworks.loading import in_host_memory
from tensortap.kernels import summarize
from tensortap.kernels.probe import probe
from tensortap.records import Summary
from tensortap.report.wording import shape

__all__ = ["Change", "Ledger"]


@dataclass(slots=True, eq=False)
class _Known:
    identity: Identity | None
    probe: bytes
    shape: tuple[int, ...]
    dtype: str
    summary: Summary | None
    """None while there are no elements to look at: a meta tensor, a lazy parameter."""


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that is not what it was."""

    rel_l2: float
    """|new - old| / |old|, from the sketches; NaN where there is nothing to compare with."""
    detail: str = ""
    made: bool = False
    """It had no elements before."""


class Ledger:
    """Knows tensors by their names in the model, so that a replaced one is still the same entry."""

    def __init__(self, framework: Framework, model: Any) -> None:
        self._framework = framework
        self._model = model
        self._known: dict[str, _Known] = {}
        self.kinds: dict[str, str] = {}
        self.look(thorough=True)

    @property
    def names(self) -> list[str]:
        return list(self._known)

    def tensors(self) -> Iterator[tuple[str, str, Any]]:
        """(name, kind, tensor) of all there are now; a tied one under each of its names."""
        for site in Tree(self._framework, self._model).sites:
            prefix = f"{site.name}." if site.name else ""
            for kind, found in (
                ("parameter", self._framework.parameters(site.owner)),
                ("buffer", self._framework.buffers(site.owner)),
            ):
                for name, tensor in found:
                    yield prefix + name, kind, tensor

    def forget(self) -> None:
        """Let go of the model. What was known stays known."""
        self._model = None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._known[name].shape

    def look(self, thorough: bool) -> dict[str, Change]:
        """Compare all tensors with the last look.

        Without `thorough` a tensor in the same memory, with the same version and the same few elements passes for
        unchanged; frameworks do not count what is changed behind autograd's back (`weight.data[3] = 0`).
        """
        changed: dict[str, Change] = {}
        seen: dict[int, _Known] = {}  # tied tensors are looked at once
        for name, kind, tensor in self.tensors():
            self.kinds[name] = kind
            old = self._known.get(name)
            new = seen.get(id(tensor)) or self._state(tensor, old, thorough)
            seen[id(tensor)] = new
            self._known[name] = new
            if old is not None and (change := _difference(old, new)) is not None:
                changed[name] = change
            elif old is None:
                changed[name] = Change(float("nan"), made=True)
        return changed

    def _state(self, tensor: Any, old: _Known | None, thorough: bool) -> _Known:
        framework = self._framework
        dtype = str(tensor.dtype).rpartition(".")[2]
        if reason := framework.unreadable(tensor):
            # A lazy parameter has no shape, and says so by raising.
            return _Known(None, b"", () if "initialised" in reason else tuple(tensor.shape), dtype, None)
        sizes = tuple(int(size) for size in tensor.shape)
        identity = framework.identity(tensor)
        same = old is not None and old.summary is not None and _same(old.identity, identity)
        if same and not thorough and old is not None:
            if not in_host_memory(tensor):
                return old
            if probe(framework.host(tensor)) == old.probe:
                return old
        array = framework.host(tensor)
        seen = probe(array) if in_host_memory(tensor) else b""
        return _Known(identity, seen, sizes, dtype, summarize(array))


def _same(old: Identity | None, new: Identity | None) -> bool:
    return old is not None and new is not None and old.token == new.token and old.alive()


def _difference(old: _Known, new: _Known) -> Change | None:
    if old is new:
        return None
    if old.shape != new.shape:
        return Change(float("nan"), f"{shape(old.shape)} became {shape(new.shape)}", old.summary is None)
    if old.summary is None or new.summary is None:
        return Change(float("nan"), made=True) if old.summary is None and new.summary is not None else None
    if old.dtype == new.dtype and old.summary.digest == new.summary.digest:
        return None
    gap = np.linalg.norm(new.summary.sketch.astype(np.float64) - old.summary.sketch.astype(np.float64))
    rel = float(gap) / old.summary.l2 if old.summary.l2 else (math.inf if gap else 0.0)
    detail = f"{old.dtype} became {new.dtype}" if old.dtype != new.dtype else ""
    if new.summary.nonfinite and not old.summary.nonfinite:
        detail = "; ".join(filter(None, (detail, "not all finite any more")))
    return Change(rel, detail)

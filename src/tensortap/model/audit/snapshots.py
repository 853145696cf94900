"""Snapshots of every parameter and buffer of a model, to find which have changed since the last one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensortap.capture.modules.tree import Tree
from tensortap.core.records import Summary
from tensortap.frameworks.base import Framework, Identity
from tensortap.frameworks.loading import few_elements
from tensortap.frameworks.registered import TensorRegistration, registered
from tensortap.kernels import summarize
from tensortap.kernels.summary.reference import sketch_distance
from tensortap.report.wording import shape

__all__ = ["Change", "TensorSnapshots"]


@dataclass(slots=True, eq=False)
class _Snapshot:
    identity: Identity | None
    sample: bytes
    shape: tuple[int, ...]
    dtype: str
    summary: Summary | None
    """None while the tensor has no elements to read: a meta tensor, a lazy parameter."""


@dataclass(frozen=True, slots=True)
class Change:
    """Difference of a tensor from its last snapshot."""

    rel_l2: float = math.nan
    """|new - old| / |old|, from the sketches. NaN if there is no old value, or the ratio is meaningless: the old values
    were all zero, or the tensor is a counter."""
    l2: float = math.nan
    """|new - old|; NaN if there is no old value."""
    detail: str = ""
    created: bool = False
    """Whether the tensor had no elements before."""


class TensorSnapshots:
    """The latest snapshot of each tensor, by its name in the model. A tensor that replaces another takes its name."""

    def __init__(self, framework: Framework, model: Any) -> None:
        self._framework = framework
        self._model = model
        self._snapshots: dict[str, _Snapshot] = {}
        self.registrations: dict[str, TensorRegistration] = {}
        self.update(full=True)

    @property
    def names(self) -> list[str]:
        return list(self._snapshots)

    def tensors(self) -> Iterator[tuple[str, TensorRegistration, Any]]:
        """Yield (name, registration, tensor) of the model's current tensors; a tied tensor under each of its names."""
        for site in Tree(self._framework, self._model).sites:
            prefix = f"{site.name}." if site.name else ""
            for name, tensor, registration in registered(self._framework, site.owner):
                yield prefix + name, registration, tensor

    def release(self) -> None:
        """Drop the reference to the model. The snapshots stay."""
        self._model = None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._snapshots[name].shape

    def summary(self, name: str) -> Summary | None:
        """Return the tensor's summary in its last snapshot; None while it has no elements."""
        return self._snapshots[name].summary

    def update(self, full: bool) -> dict[str, Change]:
        """Take a new snapshot of all tensors, and return those that changed.

        With `full=False`, a tensor with the same memory, version and sampled elements counts as unchanged. Frameworks
        do not count changes that bypass autograd (`weight.data[3] = 0`), so these may go unseen until a full update.
        """
        changed: dict[str, Change] = {}
        seen: dict[int, _Snapshot] = {}  # tied tensors are read once
        for name, registration, tensor in self.tensors():
            self.registrations[name] = registration
            old = self._snapshots.get(name)
            new = seen.get(id(tensor)) or self._take_snapshot(tensor, old, full)
            seen[id(tensor)] = new
            self._snapshots[name] = new
            if old is not None and (change := _find_change(old, new)) is not None:
                changed[name] = change
            elif old is None:
                changed[name] = Change(created=True)
        return changed

    def _take_snapshot(self, tensor: Any, old: _Snapshot | None, full: bool) -> _Snapshot:
        framework = self._framework
        dtype = str(tensor.dtype).rpartition(".")[2]
        if reason := framework.unreadable(tensor):
            # Reading the shape of a lazy parameter raises.
            return _Snapshot(None, b"", () if "initialised" in reason else tuple(tensor.shape), dtype, None)
        sizes = tuple(int(size) for size in tensor.shape)
        identity = framework.identity(tensor)
        sample = few_elements(framework, tensor)
        if old is not None and not full and _is_same(old.identity, identity) and sample == old.sample:
            return old
        array = framework.host(tensor)
        summary = summarize(array)
        if old is not None and old.summary is not None and (old.shape, old.dtype) == (sizes, dtype):
            # Snapshots of the same values share one summary.
            summary = old.summary if old.summary.digest == summary.digest else summary
        return _Snapshot(identity, sample, sizes, dtype, summary)


def _is_same(old: Identity | None, new: Identity | None) -> bool:
    return old is not None and new is not None and old.token == new.token and old.alive()


def _find_change(old: _Snapshot, new: _Snapshot) -> Change | None:
    if old is new:
        return None
    if old.shape != new.shape:
        return Change(detail=f"{shape(old.shape)} became {shape(new.shape)}", created=old.summary is None)
    if old.summary is None or new.summary is None:
        return Change(created=True) if old.summary is None and new.summary is not None else None
    if old.dtype == new.dtype and old.summary.digest == new.summary.digest:
        return None
    distance = sketch_distance(old.summary, new.summary)
    counter = new.summary.elements == 1 and "int" in new.dtype
    detail = f"{old.dtype} became {new.dtype}" if old.dtype != new.dtype else ""
    if new.summary.nonfinite and not old.summary.nonfinite:
        detail = "; ".join(filter(None, (detail, "not all finite any more")))
    return Change(distance / old.summary.l2 if old.summary.l2 and not counter else math.nan, distance, detail)

"""The outline of a run that mapping uses: its modules, their tensors, their inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tensortap.core.records import display_name
from tensortap.mapping.outline import ModelOutline, ModuleOutline, TensorOutline, full_name
from tensortap.mapping.value_matches import Values
from tensortap.store import Run

__all__ = ["outline_of"]

_TIED = re.compile(r"(\S+) is tied to (\S+) and recorded there")  # as capture writes it
_STATE = {"param": "param", "param_grad": "param", "step_grad": "param", "buffer": "buffer"}


def outline_of(run: Run) -> tuple[ModelOutline, Values]:
    """Return the outline of a run, over all ranks, and the inputs and outputs of its modules."""
    classes: dict[str, str] = {}
    bases: dict[str, str] = {}
    for rank in run.ranks:
        for row in run.coverage.get(rank, ()):
            if row.status != "alias":
                classes.setdefault(row.module, row.cls)
                bases.setdefault(row.module, row.base)
    tensors: dict[str, dict[str, TensorOutline]] = {}
    called: dict[str, int] = {}
    values: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for rank in run.ranks:
        for module, kind, path, cls, seq, shape in _sightings(run.columns(rank)):
            classes.setdefault(module, cls)
            if kind in _STATE:
                own = path.partition("~")[0]
                tensors.setdefault(module, {}).setdefault(own, TensorOutline(shape, _STATE[kind]))
            else:
                values.setdefault((module, kind.removeprefix("grad_")), {}).setdefault(path.partition("~")[0], shape)
            if kind in ("input", "output"):
                called.setdefault(module, seq)
    _tie(run, tensors)
    modules = [
        ModuleOutline(name, cls, tensors.get(name, {}), called.get(name), bases.get(name, ""))
        for name, cls in classes.items()
    ]
    return ModelOutline(str(run.info.get("framework", "")), modules), values


def _tie(run: Run, tensors: dict[str, dict[str, TensorOutline]]) -> None:
    """Add further names of tied tensors, which have no records of their own."""
    for row in (row for rank in run.ranks for row in run.coverage.get(rank, ())):
        for own, first in _TIED.findall(row.reason):
            module, _, name = first.rpartition(".")
            module = module.removeprefix(display_name(""))
            if (known := tensors.get(module, {}).get(name)) is not None:
                tensors.setdefault(row.module, {})[own] = replace(known, tied=full_name(module, name))


def _sightings(table: Any) -> Iterator[tuple[str, str, str, str, int, tuple[int, ...]]]:
    """Yield the first record of each module, kind and path: (module, kind, path, class, seq, shape)."""
    if not table.num_rows:
        return
    whole = np.zeros(table.num_rows, np.int64)
    for name in ("module", "kind", "path"):
        encoded = table.column(name).combine_chunks().dictionary_encode()
        whole = whole * len(encoded.dictionary) + encoded.indices.to_numpy()
    first = np.sort(np.unique(whole, return_index=True)[1])
    rows = table.select(["module", "kind", "path", "cls", "seq", "shape"]).take(first).to_pydict()
    for module, kind, path, cls, seq, shape in zip(*rows.values(), strict=True):
        yield module, kind, path, cls, seq, tuple(shape)

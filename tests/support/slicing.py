"""Slice the run of one process into the ranks of a mesh, as a correct parallel run would have recorded it.

A layout says for each record and rank what the rank holds: the local tensor and its placement, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tensortap as tt
from tensortap.core import dtypes
from tensortap.core.placement import Mesh, Placement
from tensortap.core.records import Record
from tensortap.kernels.summary import reference
from tensortap.store import RunWriter

Array = npt.NDArray[Any]
Held = tuple[Array, Placement | None] | None
Cut = Callable[[Record, Array, Mesh], Held]


def meshes(sizes: Mapping[str, int]) -> list[Mesh]:
    """The mesh as every rank sees it, the last axis fastest."""
    names, numbers = tuple(sizes), tuple(sizes.values())
    return [Mesh(names, numbers, at) for at in product(*(range(size) for size in numbers))]


def shard(array: Array, dimension: int, mesh: Mesh, axis: str, **roles: str) -> tuple[Array, Placement]:
    """The rank's part along one dimension; parts differ in length if it does not divide."""
    cuts = np.linspace(0, array.shape[dimension], mesh.size(axis) + 1).astype(int)
    begin, end = cuts[mesh.coordinate(axis)], cuts[mesh.coordinate(axis) + 1]
    box = tuple((0, int(begin), int(end - begin)) if at == dimension else (0, 0, n) for at, n in enumerate(array.shape))
    local = np.ascontiguousarray(np.take(array, range(begin, end), dimension))
    return local, Placement(array.shape, (box,), {axis: "shard", **roles}, "layout")


def replica(array: Array, *axes: str) -> tuple[Array, Placement]:
    return array, Placement.of_whole(array.shape, dict.fromkeys(axes, "replica"), "layout")


def partial(array: Array, mesh: Mesh, axis: str, reduction: str = "sum", seed: int = 0) -> tuple[Array, Placement]:
    """A summand: random parts that add up to the array."""
    count, at = mesh.size(axis), mesh.coordinate(axis)
    noise = np.random.default_rng(seed).normal(0, 1, (count, *array.shape))
    noise -= noise.mean(axis=0)
    part = noise[at] * (np.abs(array).mean() + 1e-30) + array.astype(np.float64) / (count if reduction == "sum" else 1)
    roles = {axis: f"partial:{reduction}"}
    return part.astype(array.dtype), Placement.of_whole(array.shape, roles, "layout")


def slice_run(source: Path, path: Path, sizes: Mapping[str, int], cut: Cut, keep: bool = True, **info: Any) -> Path:
    """Write what each rank of a mesh holds of the records of a run."""
    run = tt.open(source)
    for rank, mesh in enumerate(meshes(sizes)):
        with RunWriter(path, rank=rank, world=prod(sizes.values()), info={**_facts(run.info), **info}) as writer:
            writer.arrange(mesh, {})
            for record in run:
                held = cut(record, run.load(record), mesh)
                if held is not None:
                    write_record(writer, record, rank, *held, keep=keep)
    return path


def write_record(
    writer: RunWriter, record: Record, rank: int, array: Array, placement: Placement | None, keep: bool
) -> None:
    location = writer.put(str(record.key), array, step=record.key.step) if keep else None
    writer.append(
        Record(
            key=record.key,
            rank=rank,
            seq=record.seq,
            cls=record.cls,
            dtype=dtypes.name_of(array.dtype),
            shape=array.shape,
            tensor=record.tensor,
            summary=reference.summarize(array, placement),
            location=location,
            placement=placement,
        )
    )


def _facts(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in ("framework", "model") if name in info}

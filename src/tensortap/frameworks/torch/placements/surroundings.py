"""The surroundings of a model: wrappers that divide the batch, device meshes, pipeline stages."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tensortap.frameworks.placing import MeshAxis, StageInfo

__all__ = ["around", "group_size_and_rank", "mesh_axes", "ranks_of", "root_mesh", "stage_of"]

_STAGES = "torch.distributed.pipelining.stage"


def around(model: torch.nn.Module) -> Iterator[Any]:
    """Yield DistributedDataParallel modules and pipeline stages that hold this model. Each process searches once."""
    stage = getattr(sys.modules.get(_STAGES), "_PipelineStageBase", None)
    wanted: tuple[type, ...] = (torch.nn.parallel.DistributedDataParallel, *((stage,) if stage else ()))
    parts = {id(module) for module in model.modules()}
    for item in gc.get_objects():
        if issubclass(type(item), wanted):  # not isinstance, which runs code of lazy objects
            held = item.module if issubclass(type(item), torch.nn.Module) else item.submod
            if id(held) in parts or any(module is model for module in held.modules()):
                yield item


def stage_of(surroundings: Iterable[Any]) -> StageInfo | None:
    """Return the pipeline stage that the model is, if a stage holds it."""
    for item in surroundings:
        index, count = getattr(item, "stage_index", None), getattr(item, "num_stages", None)
        if isinstance(index, int) and isinstance(count, int):
            return StageInfo(index, count)
    return None


def group_size_and_rank(group: Any) -> tuple[int, int] | None:
    """Return size and own rank of a process group; None for anything else."""
    if not isinstance(group, dist.ProcessGroup):
        return None
    rank = dist.get_rank(group)
    return (dist.get_world_size(group), rank) if rank >= 0 else None


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that this one is a part of, if it is known and has names."""
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    return root if root is not None and root.mesh_dim_names else mesh


def mesh_axes(mesh: Any, names: tuple[str, ...]) -> list[MeshAxis]:
    """Return the axes of a device mesh; none if this process is not in it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    ranks = mesh.mesh
    found = []
    for at, name in enumerate(names):
        along = tuple(slice(None) if other == at else place for other, place in enumerate(coordinate))
        found.append(MeshAxis(name, mesh.size(at), coordinate[at], tuple(ranks[along].tolist())))
    return found


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the processes of a group, by their global ranks."""
    return tuple(dist.get_process_group_ranks(group))

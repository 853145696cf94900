"""Placements of one paddle model's tensors: DistTensors, DataParallel and sharding, fleet's parallel layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import numpy as np
import paddle

from tensortap.core.placement import GUESS, PARTIAL, REPLICA, SHARD, Placement
from tensortap.core.positions import spans_of
from tensortap.frameworks.parallel_layers import (
    activation_placement,
    group_of_layer,
    is_parallel_layer,
    parameter_placement,
)
from tensortap.frameworks.placing import DATA_AXES, MeshAxis, StageInfo

__all__ = ["PaddlePlacer", "dist_placement"]

_TENSOR_AXIS = "mp"
_FLEET_AXES = (("dp", "data"), ("pp", "pipe"), ("sharding", "sharding"), ("sep", "sep"), ("mp", "model"))
"""Names of fleet's axes, and the names in its topology's methods, the outermost first."""
_METHODS = {"data": "data", "pipe": "stage", "sharding": "sharding", "sep": "sep", "model": "model"}


class PaddlePlacer:
    """Implements `frameworks.placing.ModelPlacer`."""

    def __init__(self, model: Any) -> None:
        axes = _fleet_axes() or _mesh_axes(model)
        if not axes and paddle.distributed.get_world_size() > 1 and _is_data_parallel(model):
            axes = [MeshAxis("dp", paddle.distributed.get_world_size(), paddle.distributed.get_rank())]
        self._axes = {axis.name: axis for axis in axes if axis.size > 1}
        self.axes = list(self._axes.values())
        self.data_axes = [name for name in self._axes if name in DATA_AXES]
        pipeline = self._axes.get("pp")
        self.stage = StageInfo(pipeline.coordinate, pipeline.size) if pipeline is not None else None
        tensor = self._axes.get(_TENSOR_AXIS)
        self._group = (tensor.size, tensor.coordinate) if tensor is not None else None

    def global_names(self, modules: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
        return {}

    def expert_names(self, modules: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
        return {}

    def of_tensor(self, tensor: Any) -> Placement | None:
        return dist_placement(tensor) if tensor.is_dist() else None

    def of_parameter(self, module: Any, name: str, tensor: Any, kind: str) -> Placement | None:
        found = self.of_tensor(tensor)
        shape = tuple(tensor.shape)
        group = self._group_of(module)
        if found is None and group is not None:
            parameter = module._parameters.get(name, tensor)
            found = parameter_placement(parameter, shape, group, _TENSOR_AXIS, kind)
        if found is None and self.data_axes and kind != "buffer":
            found = Placement.of_whole(shape, {}, "paddle")
        if found is None:
            return None
        # Gradients are averaged after backward, by the reducer or the optimizer.
        role = PARTIAL + "mean" if kind == "param_grad" else REPLICA
        data = {axis: role for axis in self.data_axes if axis not in found.axes}
        return Placement(found.shape, found.boxes, {**data, **found.axes}, found.source, found.order)

    def guess(self, tensor: Any) -> Placement | None:
        return Placement.of_whole(tuple(tensor.shape), {}, GUESS)

    def of_activation(self, module: Any, kind: str, tensor: Any) -> Placement | None:
        if (group := self._group_of(module)) is None:
            return None
        base = "input" if kind in ("input", "grad_input") else "output"
        return activation_placement(module, base, tuple(tensor.shape), group, _TENSOR_AXIS)

    def _group_of(self, module: Any) -> tuple[int, int] | None:
        if not is_parallel_layer(module):
            return self._group
        return group_of_layer(module, _size_and_rank) or self._group


def dist_placement(tensor: Any) -> Placement | None:
    """Return the placement of a DistTensor; None if this process is not in its mesh."""
    mesh, rank = tensor.process_mesh, paddle.distributed.get_rank()
    where = np.argwhere(np.asarray(mesh.mesh) == rank)
    if not len(where):
        return None
    shape = tuple(tensor.shape)
    positions = [np.arange(size) for size in shape]
    roles = {}
    for name, size, own, placement in zip(
        mesh.dim_names, mesh.shape, where[0].tolist(), tensor.placements, strict=True
    ):
        if size < 2:
            continue
        if placement.is_partial():
            kind = str(placement.reduce_type()).rpartition(".")[2].lower().removeprefix("k").removeprefix("red")
            roles[name] = PARTIAL + {"avg": "mean"}.get(kind, kind or "sum")
        elif placement.is_replicated():
            roles[name] = REPLICA
        else:
            roles[name] = SHARD
            along = placement.get_dim()
            positions[along] = np.array_split(positions[along], _edges(len(positions[along]), size))[own]
    return Placement(shape, tuple(product(*(spans_of(each) for each in positions))), roles, "paddle")


def _edges(length: int, count: int) -> list[int]:
    """Return the positions at which a dimension is cut: all parts but the last have the same size."""
    part = -(-length // count)
    return [min(length, part * at) for at in range(1, count)]


def _fleet_axes() -> list[MeshAxis]:
    """Return the axes of fleet's topology; none if fleet is not initialised."""
    from paddle.distributed import fleet

    try:
        topology = fleet.get_hybrid_communicate_group()
    except (AttributeError, RuntimeError):
        return []
    found = []
    for name, axis in _FLEET_AXES:
        method = "pipe" if axis == "pipe" else axis
        size = getattr(topology, f"get_{method}_parallel_world_size", None)
        rank = getattr(topology, f"get_{_METHODS[axis]}_parallel_rank" if axis != "pipe" else "get_stage_id", None)
        if size is not None and rank is not None and topology is not None and size() > 1:
            found.append(MeshAxis(name, size(), rank()))
    return found


def _mesh_axes(model: Any) -> list[MeshAxis]:
    """Return the axes of the mesh of the first DistTensor among the parameters."""
    rank = paddle.distributed.get_rank()
    for parameter in model.parameters():
        if parameter.is_dist():
            mesh = parameter.process_mesh
            where = np.argwhere(np.asarray(mesh.mesh) == rank)
            if len(where):
                return [MeshAxis(*each) for each in zip(mesh.dim_names, mesh.shape, where[0].tolist(), strict=True)]
    return []


def _is_data_parallel(model: Any) -> bool:
    names = [type(layer).__name__ for layer in model.sublayers(include_self=True)]
    return "DataParallel" in names


def _size_and_rank(group: Any) -> tuple[int, int] | None:
    size, rank = getattr(group, "nranks", None), getattr(group, "rank", None)
    return (size, rank) if isinstance(size, int) and isinstance(rank, int) and 0 <= rank < size else None

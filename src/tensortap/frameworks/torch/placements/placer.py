"""Placements of one torch model's tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tensortap.core.placement import GUESS, PARTIAL, REPLICA, SHARD, Placement
from tensortap.frameworks.parallel_layers import (
    activation_placement,
    group_of_layer,
    is_parallel_layer,
    parameter_placement,
)
from tensortap.frameworks.placing import DATA_AXES, MeshAxis
from tensortap.frameworks.torch.placements.dtensors import axis_names, origins_of, spec_of, spec_placement
from tensortap.frameworks.torch.placements.heads import part_by_heads
from tensortap.frameworks.torch.placements.megatron import sharded_state
from tensortap.frameworks.torch.placements.sharded import (
    FlatPiece,
    flat_pieces,
    flat_placement,
    fsdp1_units,
    fsdp2_groups,
    gathered_parameters,
    piece_placement,
)
from tensortap.frameworks.torch.placements.stages import global_expert_names, global_layer_names
from tensortap.frameworks.torch.placements.statistics import running_statistic
from tensortap.frameworks.torch.placements.surroundings import (
    around,
    group_size_and_rank,
    mesh_axes,
    ranks_of,
    root_mesh,
    stage_of,
)

__all__ = ["TorchPlacer"]

_TENSOR_AXIS = "tp"


class TorchPlacer:
    """Implements `frameworks.placing.ModelPlacer`."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Examine the model and its surroundings. The model must be wrapped and divided by now."""
        self._model = model
        found = list(around(model))
        self.stage = stage_of(found)
        self._axes: dict[str, MeshAxis] = {}
        self._data: list[str] = []
        self._replicated = any(isinstance(each, torch.nn.parallel.DistributedDataParallel) for each in found)
        """Whether DistributedDataParallel averages gradients after the hooks have seen them."""
        groups = fsdp2_groups(model)
        self._sharded_axes = self._add_fsdp2(groups)
        self._gathered = gathered_parameters(groups)
        self._add_meshes()
        self._flat_axes = self._add_fsdp1()
        self._pieces: dict[tuple[int, str], FlatPiece] = flat_pieces(model)
        for wrapper in found:
            if isinstance(wrapper, torch.nn.parallel.DistributedDataParallel):
                self._add_group("dp", wrapper.process_group)
        specs = [spec for parameter in model.parameters() if (spec := spec_of(parameter)) is not None]
        self._divides_layers = any(set(axis_names(each.mesh, "dp")) - set(self._sharded_axes) for each in specs)
        """Whether layers compute with DTensors, so that plain values may be parts."""
        self._tensor_group = self._find_tensor_group()
        self._layer_groups: dict[int, tuple[int, int] | None] = {}
        self._states: dict[int, Mapping[str, Placement]] = {}
        self._data += [name for name in self._axes if name in DATA_AXES and name not in self._data]
        self.axes = sorted(self._axes.values(), key=lambda axis: axis.name not in self._data)
        """The data axes are outermost."""
        self.data_axes = self._data

    # --- what is known -----------------------------------------------------------------------------------------
    def _add_fsdp2(self, groups: list[Any]) -> tuple[str, ...]:
        names: list[str] = []
        for group in groups:
            info = group.mesh_info
            known = axis_names(info.mesh, "dp")
            own = [at for at in (info.replicate_mesh_dim, info.shard_mesh_dim) if at is not None]
            for axis in mesh_axes(info.mesh, known):
                if axis.name in [known[at] for at in own]:
                    self._axes.setdefault(axis.name, axis)
                    names += [axis.name] if axis.name not in names else []
        self._data += names
        return tuple(names)

    def _add_meshes(self) -> None:
        """Add the axes of all DTensors among parameters, and those of the mesh that theirs is a part of."""
        for parameter in self._model.parameters():
            if (spec := spec_of(parameter)) is None:
                continue
            unnamed = self._unnamed(spec.mesh)
            for mesh in dict.fromkeys((root_mesh(spec.mesh), spec.mesh)):
                for axis in mesh_axes(mesh, axis_names(mesh, unnamed)):
                    if axis.size > 1 or axis.name in self._axes:
                        self._axes.setdefault(axis.name, axis)

    def _add_fsdp1(self) -> tuple[str, ...]:
        for unit in fsdp1_units(self._model):
            if getattr(unit, "process_group", None) is not None:
                between = getattr(unit, "_inter_node_pg", None)
                if between is not None and group_size_and_rank(between) is not None:
                    self._add_group("dp_replicate", between)
                name = "dp" if between is None else "dp_shard"
                self._add_group(name, unit.process_group)
                return (name,)
        return ()

    def _add_group(self, name: str, group: Any) -> None:
        found = group_size_and_rank(group)
        if found is None or found[0] < 2:
            return
        ranks = ranks_of(group)
        same = [axis for axis in self._axes.values() if axis.ranks == ranks and axis.name in DATA_AXES]
        if same:  # the same processes, under the name of a mesh
            name = same[0].name
        self._axes.setdefault(name, MeshAxis(name, *found, ranks))
        if name not in self._data:
            self._data.append(name)

    def _find_tensor_group(self) -> tuple[int, int] | None:
        if (axis := self._axes.get(_TENSOR_AXIS)) is not None:
            return axis.size, axis.coordinate
        for name in ("megatron.core.parallel_state", "megatron.core.mpu"):
            if (state := sys.modules.get(name)) is not None:
                try:
                    found = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
                except (AssertionError, RuntimeError, AttributeError):  # it is not initialised
                    continue
                self._axes.setdefault(_TENSOR_AXIS, MeshAxis(_TENSOR_AXIS, *found))
                return found
        for module in self._model.modules():
            if is_parallel_layer(module) and (group := group_of_layer(module, group_size_and_rank)) is not None:
                self._axes.setdefault(_TENSOR_AXIS, MeshAxis(_TENSOR_AXIS, *group))
                return group
        return None

    def _unnamed(self, mesh: Any) -> str:
        return "dp" if self._sharded_axes == ("dp",) and mesh.ndim == 1 else _TENSOR_AXIS

    # --- placements --------------------------------------------------------------------------------------------
    def global_names(self, modules: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
        return global_layer_names(modules)

    def expert_names(self, modules: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
        return global_expert_names(modules)

    def of_tensor(self, tensor: torch.Tensor) -> Placement | None:
        spec = spec_of(tensor)
        return None if spec is None else self._by_spec(spec)

    def _by_spec(self, spec: Any) -> Placement | None:
        own = set(axis_names(spec.mesh, "dp"))
        source = "fsdp2" if self._sharded_axes and own <= set(self._sharded_axes) else "dtensor"
        return spec_placement(spec, self._unnamed(spec.mesh), source)

    def of_parameter(self, module: torch.nn.Module, name: str, tensor: torch.Tensor, kind: str) -> Placement | None:
        found = self._of_parameter(module, name, tensor, kind)
        if found is None or kind == "buffer":
            return found
        data = {axis: self._data_role(kind) for axis in self._data if axis not in found.axes}
        return Placement(found.shape, found.boxes, {**data, **found.axes}, found.source, found.order)

    def _of_parameter(self, module: torch.nn.Module, name: str, tensor: torch.Tensor, kind: str) -> Placement | None:
        shape = tuple(tensor.shape)
        gathered = (id(module), name) in self._gathered
        if (known := self.of_tensor(tensor)) is not None:
            due = [axis for axis in self._sharded_axes if axis not in known.axes] if gathered else []
            return replace(known, axes={**dict.fromkeys(due, self._gathered_role(kind)), **known.axes})
        if gathered:
            return Placement.of_whole(shape, dict.fromkeys(self._sharded_axes, self._gathered_role(kind)), "fsdp2")
        if (piece := self._pieces.get((id(module), name))) is not None:
            return piece_placement(piece, shape, self._flat_axes, kind)
        parameter = module._parameters.get(name)
        divided = self._axes.get(self._flat_axes[0]) if self._flat_axes else None
        if divided is not None and (flat := flat_placement(parameter, shape, divided, kind)) is not None:
            return flat
        group = self._group_of(module, parameter)
        if group is not None:
            if (by_state := self._state_of(module).get(name)) is not None and by_state.fits(shape):
                return by_state
            item = tensor if parameter is None else parameter
            if (found := parameter_placement(item, shape, group, _TENSOR_AXIS, kind)) is not None:
                return found
        if kind == "buffer":
            return running_statistic(module, name, shape, self._data)
        return Placement.of_whole(shape, {}, "ddp") if self._replicated else None

    def _data_role(self, kind: str) -> str:
        return PARTIAL + "mean" if kind == "param_grad" else REPLICA

    @staticmethod
    def _gathered_role(kind: str) -> str:
        """Return the role of FSDP2's axes for a parameter that is gathered: its gradient is not yet reduced."""
        return PARTIAL + "mean" if kind == "param_grad" else REPLICA

    def guess(self, tensor: torch.Tensor) -> Placement | None:
        """Return the placement of the nearest DTensor of the same local shape that a plain tensor was computed from.

        Without one, the tensor counts as a replica, unless it was computed from a shard of another shape; it may be a
        part by heads then.
        """
        shape = tuple(tensor.shape)
        near = [self._by_spec(spec) for spec in origins_of(tensor)] if self._divides_layers else []
        for placement in near:
            if placement is not None and placement.boxes and _local_shape(placement) == shape:
                axes = {axis: role for axis, role in placement.axes.items() if not role.startswith(PARTIAL)}
                return replace(placement, axes=axes, source=GUESS)
        shards = [placement for placement in near if placement is not None and placement.shards]
        if shards:
            by_heads = {part_by_heads(placement, shape) for placement in shards}
            return by_heads.pop() if len(by_heads) == 1 else None
        return Placement.of_whole(shape, {}, GUESS)

    def of_activation(self, module: torch.nn.Module, kind: str, tensor: torch.Tensor) -> Placement | None:
        if (by_weight := self._of_linear(module, kind, tuple(tensor.shape))) is not None:
            return by_weight
        group = self._group_of(module, None)
        if group is None:
            return None
        base = "input" if kind in ("input", "grad_input") else "output"
        return activation_placement(module, base, tuple(tensor.shape), group, _TENSOR_AXIS)

    def _of_linear(self, module: torch.nn.Module, kind: str, shape: tuple[int, ...]) -> Placement | None:
        """Return the placement of a plain input or output of a linear layer whose weight is divided.

        Its last dimension is divided like that of the weight if it has the local size, not that of the whole.
        """
        weight = module._parameters.get("weight") if isinstance(module, torch.nn.Linear) else None
        spec = None if weight is None else spec_of(weight)
        placement = None if spec is None else self._by_spec(spec)
        if spec is None or placement is None or len(placement.boxes) != 1 or len(placement.shape) != 2 or not shape:
            return None
        along = 1 if kind in ("input", "grad_input") else 0
        _, offset, length = placement.boxes[0][along]
        whole = placement.shape[along]
        dividing = [
            name
            for name, each in zip(axis_names(spec.mesh, self._unnamed(spec.mesh)), spec.placements, strict=True)
            if each.is_shard(along) and name not in self._sharded_axes
        ]
        if not dividing or shape[-1] != length or length == whole:
            return None
        box = (*((0, 0, size) for size in shape[:-1]), (0, offset, length))
        return Placement((*shape[:-1], whole), (box,), dict.fromkeys(dividing, SHARD), "dtensor")

    def _group_of(self, module: torch.nn.Module, parameter: Any) -> tuple[int, int] | None:
        """Return the tensor-parallel group of a layer: its own, else that of the model."""
        if id(module) not in self._layer_groups:
            own = group_of_layer(module, group_size_and_rank) if is_parallel_layer(module) else None
            self._layer_groups[id(module)] = own or self._tensor_group
        return self._layer_groups[id(module)]

    def _state_of(self, module: torch.nn.Module) -> Mapping[str, Placement]:
        if id(module) not in self._states:
            self._states[id(module)] = sharded_state(module, _TENSOR_AXIS)
        return self._states[id(module)]


def _local_shape(placement: Placement) -> tuple[int, ...]:
    """Return the shape of a part that is one block."""
    return tuple(length for _, _, length in placement.boxes[0]) if len(placement.boxes) == 1 else ()

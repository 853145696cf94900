"""Parameters that FSDP has divided: FSDP1's pieces of a flat parameter, FSDP2's parameters while they are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tensortap.core.placement import PARTIAL, REPLICA, SHARD, Placement
from tensortap.frameworks.placing import MeshAxis

__all__ = [
    "FlatPiece",
    "flat_pieces",
    "flat_placement",
    "fsdp1_units",
    "fsdp2_groups",
    "gathered_parameters",
    "piece_placement",
]


class FlatPiece(NamedTuple):
    """The part of one original parameter that this process has of a flat parameter."""

    shape: tuple[int, ...]
    start: int
    """Flat position of its first element in the original parameter."""
    elements: int


def fsdp1_units(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the FullyShardedDataParallel modules of a model, which may be one itself."""
    for module in model.modules():
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
            yield module


def flat_pieces(model: torch.nn.Module) -> dict[tuple[int, str], FlatPiece]:
    """Return the pieces of all original parameters, by the id of their module and their name."""
    found = {}
    for unit in fsdp1_units(model):
        flat = getattr(getattr(unit, "_handle", None), "flat_param", None)
        if flat is None:
            continue
        details = zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
        for info, shape, shard in details:
            start, count = (shard.intra_param_start_idx, shard.numel_in_shard) if shard.in_shard else (0, 0)
            found[id(info.module), info.param_name] = FlatPiece(tuple(shape), start, count)
    return found


def piece_placement(piece: FlatPiece, shape: tuple[int, ...], axes: tuple[str, ...], kind: str) -> Placement | None:
    """Return the placement of a parameter of FSDP1, which is gathered or not, or of its gradient."""
    if shape == piece.shape and (kind == "param_grad" or piece.shape != (piece.elements,)):
        role = PARTIAL + "mean" if kind == "param_grad" else REPLICA
        return Placement.of_whole(shape, dict.fromkeys(axes, role), "fsdp1")
    elements = int(torch.Size(shape).numel())
    if elements != piece.elements:
        return None
    box = ((0, piece.start, elements),)
    return Placement(piece.shape, (box,), dict.fromkeys(axes, SHARD), "fsdp1")


def flat_placement(parameter: Any, shape: tuple[int, ...], axis: MeshAxis, kind: str) -> Placement | None:
    """Return the placement of a flat parameter that replaces all parameters of its unit (`use_orig_params=False`).

    None for any other parameter. A flat parameter is padded to equal ranges.
    """
    sharded = getattr(parameter, "_sharded_size", None) if getattr(parameter, "_is_flat_param", False) else None
    if sharded is None:
        return None
    size = int(sharded.numel())
    if shape == (size,):
        return Placement((size * axis.size,), (((0, axis.coordinate * size, size),),), {axis.name: SHARD}, "fsdp1")
    return Placement.of_whole(shape, {axis.name: PARTIAL + "mean" if kind == "param_grad" else REPLICA}, "fsdp1")


def fsdp2_groups(model: torch.nn.Module) -> list[Any]:
    """Return the parameter groups that `fully_shard` made."""
    found: list[Any] = []
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        if state is None:
            continue
        state = state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [group] if (group := getattr(state, "_fsdp_param_group", None)) is not None else []
        found += groups
    return found


def gathered_parameters(groups: list[Any]) -> Mapping[tuple[int, str], Any]:
    """Return the parameters of FSDP2 by the id of their module and their name."""
    found = {}
    for group in groups:
        for parameter in group.fsdp_params:
            info = parameter._module_info
            found[id(info.module), info.param_name] = parameter
            for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                found[id(module), name] = parameter
    return found

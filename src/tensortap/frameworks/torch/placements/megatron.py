"""Placements from `sharded_state_dict`, by which Megatron's modules describe their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tensortap.core.placement import REPLICA, SHARD, Placement

__all__ = ["sharded_state"]


def sharded_state(module: torch.nn.Module, axis: str) -> Mapping[str, Placement]:
    """Return the placements of a module's own parameters by name; none if the module describes nothing."""
    describe = getattr(module, "sharded_state_dict", None)
    if not callable(describe) or not any(each is not None for each in module._parameters.values()):
        return {}
    try:
        described = describe(prefix="")
    except Exception:  # code of another library, which may need its own process groups
        return {}
    if not isinstance(described, Mapping):
        return {}
    found = {}
    for name, parameter in module._parameters.items():
        entry = described.get(name)
        if parameter is not None and entry is not None and (placement := _placement(entry, parameter, axis)):
            found[name] = placement
    return found


def _placement(entry: Any, parameter: torch.Tensor, axis: str) -> Placement | None:
    """Return the placement of a ShardedTensor: axes before the tensor's own, such as the layer, are left out."""
    try:
        before = int(getattr(entry, "prepend_axis_num", 0) or 0)
        whole = tuple(int(size) for size in entry.global_shape)[before:]
        offset = tuple(int(at) for at in entry.global_offset)[before:]
    except (AttributeError, TypeError, ValueError):
        return None
    local = tuple(parameter.shape)
    if not len(whole) == len(offset) == len(local) or getattr(entry, "flattened_range", None) is not None:
        return None
    # A whole that ends inside of the local part leaves out its padding.
    kept = tuple(max(0, min(size, end - at)) for size, end, at in zip(local, whole, offset, strict=True))
    starts = tuple(min(at, end) for at, end in zip(offset, whole, strict=True))
    box = tuple((0, at, size) for at, size in zip(starts, kept, strict=True))
    return Placement(whole, (box,), {axis: REPLICA if whole == local else SHARD}, "megatron")

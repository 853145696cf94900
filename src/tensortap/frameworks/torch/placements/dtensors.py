"""The placement of a DTensor, from its own specification."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from tensortap.core.placement import PARTIAL, REPLICA, SHARD, Placement
from tensortap.core.positions import spans_of

__all__ = ["axis_names", "origins_of", "spec_of", "spec_placement"]

_REDUCTIONS = {"avg": "mean"}
_DEPTH, _BREADTH = 32, 32
"""Distance to which the graph is searched, and number of nodes at each distance."""


def spec_of(tensor: torch.Tensor) -> Any | None:
    """Return the specification of a DTensor, or of the one that a plain tensor was taken from by `to_local`."""
    spec = getattr(tensor, "_spec", None)
    if spec is not None and hasattr(spec, "placements"):
        return spec
    node = tensor.grad_fn
    if node is not None and type(node).__name__ == "_ToTorchTensorBackward":
        return getattr(node, "dtensor_spec", None)
    return None


def origins_of(tensor: torch.Tensor) -> list[Any]:
    """Return the specifications of the nearest DTensors in the graph that a plain tensor was computed by."""
    found, seen = [], set()
    level = [tensor.grad_fn] if tensor.grad_fn is not None else []
    for _ in range(_DEPTH):
        following = []
        for node in level:
            if type(node).__name__ == "_ToTorchTensorBackward":
                if (spec := getattr(node, "dtensor_spec", None)) is not None:
                    found.append(spec)
                continue
            following += [each for each, _ in node.next_functions if each is not None and each not in seen]
        if found:
            return found
        seen.update(following)
        level = following[:_BREADTH]
    return found


def axis_names(mesh: Any, unnamed: str) -> tuple[str, ...]:
    """Return the names of a mesh's axes; those of a mesh without names begin with `unnamed`."""
    names = mesh.mesh_dim_names
    if names:
        return tuple(names)
    return (unnamed,) if mesh.ndim == 1 else tuple(f"{unnamed}{at}" for at in range(mesh.ndim))


def spec_placement(spec: Any, unnamed: str, source: str) -> Placement | None:
    """Return the placement that a specification describes; None if this process is not in its mesh."""
    mesh = spec.mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    sizes = tuple(mesh.size(at) for at in range(mesh.ndim))
    try:
        return _placement(
            tuple(spec.shape), tuple(spec.placements), sizes, tuple(coordinate), axis_names(mesh, unnamed), source
        )
    except TypeError:  # placements of other libraries need not be hashable
        return _place(
            tuple(spec.shape), tuple(spec.placements), sizes, tuple(coordinate), axis_names(mesh, unnamed), source
        )


def _place(
    shape: tuple[int, ...],
    placements: Sequence[Any],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    names: tuple[str, ...],
    source: str,
) -> Placement:
    indices = [torch.arange(size) for size in shape]
    roles = {}
    for placement, size, own, name in zip(placements, sizes, coordinate, names, strict=True):
        if placement.is_partial():
            operation = str(getattr(placement, "reduce_op", "sum"))
            roles[name] = PARTIAL + _REDUCTIONS.get(operation, operation)
        elif placement.is_replicate():
            roles[name] = REPLICA
        else:  # Shard and _StridedShard
            roles[name] = SHARD
            along = placement.dim
            indices[along] = _share(placement, indices[along], size, own)
    if size_one := [name for name, size in zip(names, sizes, strict=True) if size == 1]:
        roles = {name: role for name, role in roles.items() if name not in size_one}
    spans = [spans_of(index.numpy()) for index in indices]
    return Placement(shape, tuple(product(*spans)), roles, source)


_placement = lru_cache(maxsize=4096)(_place)


def _share(placement: Any, indices: torch.Tensor, size: int, own: int) -> torch.Tensor:
    """Return the part of a dimension that this process has, as torch itself divides it."""
    factor = getattr(placement, "split_factor", None)
    along = type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)
    parts, _ = along._split_tensor(indices, size, with_padding=False, contiguous=True)
    return parts[own] if own < len(parts) else indices[:0]

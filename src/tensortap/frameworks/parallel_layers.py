"""Parallel layers by their attributes, as Megatron and fleet name them: which dimension a process holds a part of.

Both libraries, and code written after them, mark parameters (`partition_dim`, `partition_stride`, `is_distributed`,
`split_axis`, `sequence_parallel`) and layers (`gather_output`, `input_is_parallel`). No library is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensortap.core.placement import PARTIAL, REPLICA, SHARD, Placement
from tensortap.core.positions import Division as _Division
from tensortap.core.positions import Positions, divide, from_positions

__all__ = ["GroupOf", "activation_placement", "group_of_layer", "is_parallel_layer", "parameter_placement"]

GroupOf = Callable[[Any], "tuple[int, int] | None"]
"""Returns size and own rank of a process group, or None if the object is none."""

SOURCE = "megatron"
_GROUPS = ("tp_group", "_tp_group", "model_parallel_group", "process_group", "group", "pg")
_SIZES = ("tp_size", "tp_world_size", "tensor_model_parallel_size", "world_size", "_world_size")
_RANKS = ("tp_rank", "tensor_model_parallel_rank", "_rank", "rank")
_COLUMN, _ROW, _VOCABULARY = "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"


def is_parallel_layer(module: Any) -> str:
    """Return the known layer that a module is, also by inheritance or as part of its class's name; "" if none."""
    for cls in type(module).__mro__:
        for known in (_COLUMN, _ROW, _VOCABULARY):
            if known in cls.__name__ or known.replace("ParallelLinear", "SequenceParallelLinear") in cls.__name__:
                return known
    return ""


def group_of_layer(item: Any, group_of: GroupOf) -> tuple[int, int] | None:
    """Return size and rank of the tensor-parallel group that a layer or parameter names by an attribute."""
    for name in _GROUPS:
        if (group := getattr(item, name, None)) is not None and (found := group_of(group)) is not None:
            return found
    size = next((getattr(item, name) for name in _SIZES if isinstance(getattr(item, name, None), int)), None)
    rank = next((getattr(item, name) for name in _RANKS if isinstance(getattr(item, name, None), int)), None)
    return (size, rank) if size is not None and rank is not None and 0 <= rank < size else None


def parameter_placement(
    parameter: Any, shape: Sequence[int], group: tuple[int, int], axis: str, kind: str
) -> Placement | None:
    """Return the placement of a parameter or its gradient by its attributes; None if they say nothing."""
    size, rank = group
    dimension, stride = _split_of(parameter)
    if dimension is not None and dimension < len(shape):
        whole, positions = _strided(shape[dimension], size, rank, stride)
        sizes = [whole if at == dimension else each for at, each in enumerate(shape)]
        return from_positions(
            sizes, [positions if at == dimension else None for at in range(len(shape))], {axis: SHARD}, SOURCE
        )
    if getattr(parameter, "sequence_parallel", None) is True:
        role = PARTIAL + "sum" if kind == "param_grad" else REPLICA
        return Placement.of_whole(shape, {axis: role}, SOURCE)
    if getattr(parameter, "tensor_model_parallel", None) is False:
        return Placement.of_whole(shape, {axis: REPLICA}, SOURCE)
    return None


def activation_placement(
    module: Any, kind: str, shape: Sequence[int], group: tuple[int, int], axis: str
) -> Placement | None:
    """Return the placement of an input or output of a parallel layer; None for other layers and other tensors."""
    layer = is_parallel_layer(module)
    if not layer or not shape:
        return None
    sequence = getattr(module, "sequence_parallel", False) is True or "SequenceParallel" in type(module).__name__
    into = kind in ("input", "grad_input")
    if layer == _COLUMN:
        split = (0 if sequence else None) if into else (None if getattr(module, "gather_output", True) else -1)
    elif layer == _ROW:
        split = (-1 if getattr(module, "input_is_parallel", False) else None) if into else (0 if sequence else None)
    else:
        split = None if into else (0 if getattr(module, "reduce_scatter_embeddings", False) is True else None)
    if split is None:
        return Placement.of_whole(shape, {axis: REPLICA}, SOURCE)
    at = split % len(shape)
    whole, positions = divide(shape[at], [_Division(group[0], group[1])])
    sizes = [whole if each == at else size for each, size in enumerate(shape)]
    return from_positions(
        sizes, [positions if each == at else None for each in range(len(shape))], {axis: SHARD}, SOURCE
    )


def _split_of(parameter: Any) -> tuple[int | None, int]:
    """Return the dimension that is divided, and the stride of the division."""
    if getattr(parameter, "tensor_model_parallel", None) is True:
        dimension = getattr(parameter, "partition_dim", None)
        if isinstance(dimension, int) and dimension >= 0:
            stride = getattr(parameter, "partition_stride", 1)
            return dimension, stride if isinstance(stride, int) and stride > 0 else 1
    if getattr(parameter, "is_distributed", None) is True:
        dimension = getattr(parameter, "split_axis", None)
        if isinstance(dimension, int) and dimension >= 0:
            return dimension, 1
    return None, 1


def _strided(local: int, size: int, rank: int, stride: int) -> tuple[int, Positions]:
    """Return positions of a dimension of which a process has every size-th of `stride * size` chunks."""
    if stride == 1 or local % stride:
        return divide(local, [_Division(size, rank)])
    chunk = local // stride
    starts = (np.arange(stride) * size + rank) * chunk
    return local * size, (starts[:, None] + np.arange(chunk)).reshape(-1)

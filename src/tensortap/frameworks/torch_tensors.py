"""Small facts of torch tensors that several files need."""

from __future__ import annotations

import torch

from tensortap import dtypes

__all__ = ["NAMES", "dense"]

NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in dtypes.NAMES if isinstance(getattr(torch, name, None), torch.dtype)
}
"""All dtypes that tensortap can read and this torch has, with their names."""


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a distributed tensor, all elements of a sparse one."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()

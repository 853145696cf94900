"""Small functions on torch tensors that several files use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from tensortap.core import dtypes

__all__ = [
    "BITS",
    "NAMES",
    "PLAIN",
    "all_parameters",
    "arrived",
    "dense",
    "from_numpy",
    "is_distributed",
    "is_flat",
    "is_in_transit",
    "is_plain_flat",
]

_STRIDED = torch.strided
PLAIN = {torch.Tensor, torch.nn.Parameter}

NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in dtypes.NAMES if isinstance(getattr(torch, name, None), torch.dtype)
}
"""The readable dtypes that this torch has, with their names."""

# NumPy lacks these dtypes: their bits are passed under an integer type of the same width.
BITS: dict[torch.dtype, tuple[torch.dtype, np.dtype[Any]]] = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e5m2: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
}


def all_parameters(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield all parameters, in any order. `Module.parameters` takes five times as long, for the names it makes."""
    waiting, seen = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether each rank holds a part of the tensor."""
    return type(tensor) not in PLAIN and hasattr(tensor, "to_local")  # hasattr is slow for a missing attribute


def is_flat(tensor: torch.Tensor) -> bool:
    """Return whether a kernel can read the elements from memory as they are, one after the other."""
    return (
        tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and not tensor.data_ptr() % 16
        and not tensor.is_neg()
        and not tensor.is_complex()
    )


def is_plain_flat(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is flat, and of no special class."""
    return type(tensor) in PLAIN and is_flat(tensor)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a distributed tensor, and all elements of a sparse one."""
    if is_distributed(tensor):
        tensor = tensor.to_local()
    tensor = arrived(tensor)
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def is_in_transit(tensor: torch.Tensor) -> bool:
    """Return whether a collective may still be writing the tensor."""
    return type(tensor).__name__ == "AsyncCollectiveTensor"


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a tensor that is still in transit from other ranks, as its first use would."""
    return tensor.wait() if is_in_transit(tensor) else tensor


def from_numpy(values: npt.NDArray[np.generic]) -> torch.Tensor:
    """Return a tensor with the same bits, in new host memory."""
    name = dtypes.name_of(values.dtype)
    if not values.size:
        return torch.empty(values.shape, dtype=getattr(torch, name))
    data = bytearray(np.ascontiguousarray(values).tobytes())
    return torch.frombuffer(data, dtype=getattr(torch, name)).reshape(values.shape)

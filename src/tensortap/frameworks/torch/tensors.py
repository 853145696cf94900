"""Small facts of torch tensors that several files need."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from tensortap.core import dtypes

__all__ = ["BITS", "NAMES", "PLAIN", "dense", "is_flat", "is_shared_out", "lies_flat", "tensor_of"]

_STRIDED = torch.strided
PLAIN = {torch.Tensor, torch.nn.Parameter}

NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in dtypes.NAMES if isinstance(getattr(torch, name, None), torch.dtype)
}
"""All dtypes that tensortap can read and this torch has, with their names."""

# NumPy has no name of its own for these: their bits travel under an integer type of the same width.
BITS: dict[torch.dtype, tuple[torch.dtype, np.dtype[Any]]] = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e5m2: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
}


def is_shared_out(tensor: torch.Tensor) -> bool:
    """Whether each rank has a share of its own of the tensor."""
    return type(tensor) not in PLAIN and hasattr(tensor, "to_local")  # asking for what is not there takes long


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether its elements are those of its memory, one after the other, where a kernel can read them as they are."""
    return (
        tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and not tensor.data_ptr() % 16
        and not tensor.is_neg()
        and not tensor.is_complex()
    )


def lies_flat(tensor: torch.Tensor) -> bool:
    """The same, and it is nothing peculiar."""
    return type(tensor) in PLAIN and is_flat(tensor)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a distributed tensor, all elements of a sparse one."""
    if is_shared_out(tensor):
        tensor = tensor.to_local()
        if type(tensor).__name__ == "AsyncCollectiveTensor":  # still on its way from other ranks
            tensor = tensor.wait()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def tensor_of(values: npt.NDArray[np.generic]) -> torch.Tensor:
    """The same bits in the host's memory, in memory of its own."""
    name = dtypes.name_of(values.dtype)
    if not values.size:
        return torch.empty(values.shape, dtype=getattr(torch, name))
    data = bytearray(np.ascontiguousarray(values).tobytes())
    return torch.frombuffer(data, dtype=getattr(torch, name)).reshape(values.shape)

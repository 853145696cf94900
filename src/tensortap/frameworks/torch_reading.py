"""What can be read of a torch tensor, whether it is the same as before, and where it is looked at."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tensortap.frameworks.base import Identity, Workshop
from tensortap.frameworks.torch_tensors import BITS, NAMES, PLAIN, dense, is_shared_out
from tensortap.sending import Pinning

__all__ = ["Reading"]


class Reading:
    """The part of `frameworks.base.Framework` that is about tensors and the devices they are on."""

    def __init__(self) -> None:
        self._workshops: dict[str, Workshop | None] = {}

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def unreadable(self, tensor: torch.Tensor) -> str:
        if type(tensor) in PLAIN and tensor.dtype in NAMES and not (tensor.is_nested or tensor.is_meta):
            # By far the most common case, and asked for every tensor of a step.
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                return _WRAPPED
            return _unreadable_on_device(tensor) if tensor.is_cuda else ""
        if tensor.is_nested:
            return "a nested tensor has no single shape"
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            return "not initialised yet"
        if tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor":
            return "a meta tensor has no elements"
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return _WRAPPED
        if tensor.dtype not in NAMES:
            return f"dtype {_name(tensor.dtype)} is not supported"
        if is_traceable_wrapper_subclass(tensor) and not is_shared_out(tensor):
            return f"a {type(tensor).__name__} has no elements of its own"
        return _unreadable_on_device(tensor) if tensor.is_cuda else ""

    def identity(self, tensor: torch.Tensor) -> Identity | None:
        try:
            storage = tensor.untyped_storage()
            version = tensor._version
        except (
            RuntimeError,
            NotImplementedError,
        ):  # inference tensors have no version, sparse ones no storage
            return None
        # Flat, and a plain tuple: one that holds nothing but numbers is none of the garbage collector's business.
        token = (
            storage._cdata,
            tensor.storage_offset(),
            tensor.dtype,
            version,
            tensor.is_conj() or tensor.is_neg(),
            *tensor.shape,
            *tensor.stride(),
        )
        return Identity(token, _StorageAlive(storage))

    def host(self, tensor: torch.Tensor) -> npt.NDArray[np.generic]:
        tensor = tensor.detach()
        plain = type(tensor) in PLAIN and tensor.dtype in _NUMPY_KNOWS and tensor.layout is torch.strided
        if plain and tensor.is_cpu and not tensor.is_neg():
            return tensor.numpy()
        tensor = dense(tensor)
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        tensor = tensor.resolve_conj().resolve_neg()
        if (bits := BITS.get(tensor.dtype)) is not None:
            return tensor.view(bits[0]).numpy().view(bits[1])
        return tensor.numpy()

    # --- devices -----------------------------------------------------------------------------------------------
    def workshop(self, tensor: torch.Tensor) -> Workshop | None:
        if tensor.is_cpu:
            return None
        kind = "cuda" if tensor.is_cuda else tensor.device.type  # making a device and its name takes longer
        if kind not in self._workshops:
            self._workshops[kind] = _workshop_for(kind, tensor.device)
        return self._workshops[kind]

    def described(self, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        if is_shared_out(tensor):
            tensor = tensor.to_local()
        return NAMES[tensor.dtype], tuple(tensor.shape)

    def pinning(self, model: torch.nn.Module) -> Pinning | None:
        if not any(parameter.is_cuda for parameter in model.parameters()):
            return None
        from tensortap.frameworks.torch_sending import CudaPinning

        return CudaPinning()


class _StorageAlive:
    """Whether a storage is still there. While this exists, no other storage can get its address."""

    __slots__ = ("_reference",)

    _expired = torch.UntypedStorage._expired
    _free = torch.UntypedStorage._free_weak_ref  # at hand also when torch has been torn down at exit

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: int = storage._weak_ref()

    def __call__(self) -> bool:
        return not self._expired(self._reference)

    def __deepcopy__(self, memo: object) -> _StorageAlive:
        return self  # the reference is given back once

    def __del__(self) -> None:
        self._free(self._reference)


def _unreadable_on_device(tensor: torch.Tensor) -> str:
    if torch.cuda.is_current_stream_capturing():
        return _CAPTURING
    if tensor.layout is torch.strided and not is_shared_out(tensor) and not tensor.data_ptr() and tensor.numel():
        return "its memory has been given back"
    return ""


def _workshop_for(kind: str, device: torch.device) -> Workshop | None:
    if kind == "cuda" and torch.version.hip is None:
        from tensortap.frameworks.torch_cuda import CudaWorkshop
        from tensortap.kernels.cuda.driver import CudaError

        try:
            workshop = CudaWorkshop()
            # Of all kernels, those of 16-bit floats ask most of a device.
            workshop.submit(torch.zeros(1, dtype=torch.bfloat16, device=device))
            workshop.end_step()
        except CudaError as error:
            warnings.warn(
                f"tensortap summarises by plain torch operations, several times slower: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            return workshop
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):  # a device without float64: its tensors come to the host
        return None
    from tensortap.frameworks.torch_ops import OpsWorkshop

    return OpsWorkshop()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_NUMPY_KNOWS = {dtype for dtype in NAMES if dtype not in BITS and not dtype.is_complex}
_WRAPPED = "inside torch.func (vmap, grad) a tensor has no values of its own"
_CAPTURING = (
    "while a CUDA graph is being captured nothing runs, and its replays call no hooks: tap the model without graphs"
)

if sys.byteorder != "little":  # the digest is defined on little-endian bytes and taken from memory as it is
    raise ImportError("tensortap reads tensors on little-endian machines only")

"""Reads torch tensors: their values, their identity, and the reader for their device."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.dlpack import to_dlpack

from tensortap.core import dtypes, statistics
from tensortap.core.arguments import OpaqueValue
from tensortap.core.host_copies import MemoryPinning
from tensortap.frameworks.base import HostMemory, Identity
from tensortap.frameworks.capabilities import DeviceMark
from tensortap.frameworks.device_reader import DeviceReader, VisibleSketches
from tensortap.frameworks.tensor_kind import TensorKind
from tensortap.frameworks.torch.kinds import KindTable
from tensortap.frameworks.torch.memory import StorageAlive, StorageHold, token_of
from tensortap.frameworks.torch.tensors import (
    BITS,
    NAMES,
    PLAIN,
    all_parameters,
    dense,
    is_distributed,
    is_in_transit,
)

__all__ = ["TensorReading"]


class TensorReading:
    """The protocols `TensorValues` and `Devices` of `frameworks.base`."""

    plain_tensors: Collection[type] = PLAIN

    def __init__(self) -> None:
        self._device_readers: dict[str, DeviceReader | None] = {}
        self._host_kinds = KindTable(_host_layouts)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def opaque_value(self, value: Any) -> OpaqueValue | None:
        if type(value) is torch.dtype:
            return OpaqueValue("dtype", str(value).removeprefix("torch."))
        return OpaqueValue("device", str(value)) if type(value) is torch.device else None

    def unreadable(self, tensor: torch.Tensor) -> str:
        # Called for every tensor of a step, so plain tensors take one short path.
        plain = type(tensor) in PLAIN
        if not (plain and tensor.dtype in NAMES and not tensor.is_nested and not tensor.is_meta):
            if reason := _unreadable_by_kind(tensor):
                return reason
        elif _is_functorch(tensor):
            return _FUNCTORCH
        if tensor.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return _CAPTURING
        elif not tensor.is_cpu:
            return ""
        own = tensor.layout is torch.strided and (plain or not (is_distributed(tensor) or is_in_transit(tensor)))
        return "its memory has been freed" if own and not tensor.data_ptr() and tensor.numel() else ""

    def sampled(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a few elements of a tensor on its device; None if they are not plain numbers."""
        if type(tensor) not in PLAIN or not tensor.is_floating_point():
            return None
        with torch.no_grad():
            places = torch.linspace(0, tensor.numel() - 1, min(64, tensor.numel()), dtype=torch.float64)
            return torch.take(tensor.detach(), places.long().to(tensor.device, non_blocking=True))

    def identity(self, tensor: torch.Tensor) -> Identity | None:
        if is_in_transit(tensor):  # a wrapper without memory of its own
            return None
        token = token_of(tensor)
        return None if token is None else Identity(token, StorageAlive(tensor.untyped_storage()))

    def local_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple((tensor.to_local() if is_distributed(tensor) else tensor).shape)

    def host(self, tensor: torch.Tensor) -> npt.NDArray[np.generic]:
        tensor = tensor.detach()
        plain = type(tensor) in PLAIN and tensor.dtype in _NUMPY_KNOWS and tensor.layout is torch.strided
        if plain and tensor.is_cpu and not tensor.is_neg():
            return np.from_dlpack(_SharedMemory(tensor))
        tensor = dense(tensor)
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        tensor = tensor.resolve_conj().resolve_neg()
        if (bits := BITS.get(tensor.dtype)) is not None:
            return np.from_dlpack(_SharedMemory(tensor.view(bits[0]))).view(bits[1])
        return np.from_dlpack(_SharedMemory(tensor))

    def host_memory(self, tensor: torch.Tensor, likely: TensorKind | None = None) -> HostMemory | None:
        if type(tensor) not in PLAIN or not tensor.is_cpu:
            return None
        kind, address = likely, 0
        try:
            # The kind of a tensor on a device has no layout.
            if kind is None or not kind.layout or tensor.dtype is not kind.dtype or tensor.shape != kind.shape:
                kind = self._host_kinds.of(tensor)
            # A tensor without elements of its own has no address, and one of several shapes has no shape.
            address = tensor.data_ptr()
            if kind is None or not address or not tensor.is_contiguous() or tensor.is_neg():
                return None
            return kind, address, (kind, tensor._version, tensor.untyped_storage()._cdata, address)
        except RuntimeError:
            # An inference tensor has no version.
            return (kind, address, None) if address and kind is not None and tensor.is_inference() else None

    def gathered(self, tensor: torch.Tensor, most: int) -> tuple[Any, HostMemory] | None:
        if type(tensor) not in PLAIN or not tensor.is_cpu:
            return None
        try:
            kind, address = self._host_kinds.of(tensor), tensor.data_ptr()
            if kind is None or kind.nbytes > most or not address:
                return None
            strides = (size > 1 and stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            identity = hash((address, tensor.is_neg(), *strides))
            token = kind, tensor._version, tensor.untyped_storage()._cdata, identity
        except RuntimeError:
            return None
        array = np.ascontiguousarray(self.host(tensor))
        return array, (kind, int(array.ctypes.data), token)

    hold_tokens = StorageHold

    # --- devices -----------------------------------------------------------------------------------------------
    def device_reader(self, tensor: torch.Tensor) -> DeviceReader | None:
        if tensor.is_cpu:
            return None
        kind = "cuda" if tensor.is_cuda else tensor.device.type  # faster than making a device and its name
        if kind not in self._device_readers:
            self._device_readers[kind] = _device_reader_for(kind, tensor.device)
        return self._device_readers[kind]

    def visible_sketches(self) -> VisibleSketches | None:
        from tensortap.frameworks.torch.ops_reader import OpsSketches

        return OpsSketches()

    def device_mark(self, model: torch.nn.Module) -> DeviceMark | None:
        from tensortap.frameworks.torch.cuda.timeline import cuda_mark

        return cuda_mark(model)

    def pinning(self, model: torch.nn.Module) -> MemoryPinning | None:
        if not any(parameter.is_cuda for parameter in all_parameters(model)):
            return None
        from tensortap.frameworks.torch.cuda.host_copies import CudaMemoryPinning

        return CudaMemoryPinning()


class _SharedMemory:
    """A tensor's memory for NumPy.

    `Tensor.numpy` would keep the user from ever resizing the storage. `Tensor.__dlpack__` takes three times as long.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the host


def _unreadable_by_kind(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor has no single shape"
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return "not initialised yet"
    if tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor":
        return "a meta tensor has no elements"
    if _is_functorch(tensor):
        return _FUNCTORCH
    if tensor.dtype not in NAMES:
        return f"dtype {_name(tensor.dtype)} is not supported"
    if is_traceable_wrapper_subclass(tensor) and not is_distributed(tensor) and not is_in_transit(tensor):
        return f"a {type(tensor).__name__} has no elements of its own"
    return ""


def _device_reader_for(kind: str, device: torch.device) -> DeviceReader | None:
    if statistics.added():  # only the host computes these
        return None
    if kind == "cuda" and torch.version.hip is None:
        from tensortap.frameworks.torch.cuda.reader import CudaReader
        from tensortap.kernels.cuda.driver import CudaError

        try:
            device_reader = CudaReader()
            # The kernels of 16-bit floats have the highest requirements on a device.
            device_reader.submit(torch.zeros(1, dtype=torch.bfloat16, device=device))
            device_reader.end_step()
        except CudaError as error:
            warnings.warn(
                f"tensortap summarises with plain torch operations, several times slower: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            return device_reader
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):  # a device without float64: its tensors are copied to the host
        return None
    from tensortap.frameworks.torch.ops_reader import OpsReader

    return OpsReader()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _host_layouts() -> dict[torch.dtype, int]:
    """Return the layout of each dtype that the summary kernel of the host reads as it is."""
    from tensortap.kernels.summary.batch import layout_address  # it loads the compiler

    found = {}
    for dtype, name in NAMES.items():
        if (address := layout_address(dtypes.numpy_dtype(name))) is not None:
            found[dtype] = address
    return found


_is_functorch = torch._C._functorch.is_functorch_wrapped_tensor
_NUMPY_KNOWS = {dtype for dtype in NAMES if dtype not in BITS and not dtype.is_complex}
_FUNCTORCH = "inside torch.func (vmap, grad) a tensor has no values of its own"
_CAPTURING = (
    "while a CUDA graph is being captured nothing runs, and its replays call no hooks: tap the model without graphs"
)

if sys.byteorder != "little":  # the digest is defined on little-endian bytes and computed from memory as it is
    raise ImportError("tensortap reads tensors on little-endian machines only")

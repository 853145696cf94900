"""Which memory a torch tensor is, as it was at one moment, and that no other is taken for it later."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tensortap.frameworks.device_reader import TensorDescription
from tensortap.frameworks.torch.tensors import NAMES, is_shared_out

__all__ = ["StorageAlive", "StorageHold", "describe", "is_still", "token_of"]


def token_of(tensor: torch.Tensor) -> Hashable | None:
    """Equal while memory, geometry and version are. Once the storage is gone, another may get its address."""
    try:
        # Flat, and a plain tuple: one that holds nothing but numbers is none of the garbage collector's business.
        return (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.dtype,
            tensor._version,
            tensor.is_conj() or tensor.is_neg(),
            *tensor.shape,
            *tensor.stride(),
        )
    except (
        RuntimeError,
        NotImplementedError,
    ):  # an inference tensor has no version, a sparse or nested one no such memory
        return None


def is_still(tensor: torch.Tensor, version: int, address: int) -> bool:
    """Whether it has neither been changed, as far as that is counted, nor given its memory back since it was seen."""
    return bool(tensor._version == version and tensor.data_ptr() == address)


def describe(tensor: torch.Tensor) -> TensorDescription:
    """See `DeviceReader.describe`, of any tensor on any device."""
    token = token_of(tensor)
    if is_shared_out(tensor):
        tensor = tensor.to_local()
    return token, NAMES[tensor.dtype], tuple(tensor.shape), False


class StorageAlive:
    """Whether a storage is still there. While this exists, no other storage can get its address."""

    __slots__ = ("_reference",)

    _expired = torch.UntypedStorage._expired
    _free = torch.UntypedStorage._free_weak_ref  # at hand also when torch has been torn down at exit

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: int = storage._weak_ref()

    def __call__(self) -> bool:
        return not self._expired(self._reference)

    def __deepcopy__(self, memo: object) -> StorageAlive:
        return self  # the reference is given back once

    def __del__(self) -> None:
        self._free(self._reference)


class StorageHold:
    """Keeps the addresses of many storages from being used again: whoever has one of them later is the same storage.

    As of `StorageAlive`, but without an object for each.
    """

    __slots__ = ("_references",)

    _free = torch.UntypedStorage._free_weak_ref

    def __init__(self) -> None:
        self._references: list[int] = []

    def __len__(self) -> int:
        return len(self._references)

    def add(self, tensor: torch.Tensor) -> None:
        self._references.append(tensor.untyped_storage()._weak_ref())

    def clear(self) -> None:
        while self._references:
            self._free(self._references.pop())

    def __deepcopy__(self, memo: object) -> StorageHold:
        return self  # each reference is given back once

    def __del__(self) -> None:
        self.clear()

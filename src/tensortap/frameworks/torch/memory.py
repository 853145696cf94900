"""Identity tokens of torch tensors, and holds that keep a token from being reused."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tensortap.frameworks.device_reader import TensorDescription
from tensortap.frameworks.torch.kinds import kind_of
from tensortap.frameworks.torch.tensors import is_distributed

__all__ = ["StorageAlive", "StorageHold", "describe", "token_of"]


def token_of(tensor: torch.Tensor) -> Hashable | None:
    """Return the identity token. Another tensor may get it once the storage is freed."""
    try:
        # A flat, plain tuple of numbers: the garbage collector does not track it.
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


def describe(tensor: torch.Tensor) -> TensorDescription:
    """Implement `DeviceReader.describe` for any tensor on any device."""
    token = token_of(tensor)
    if is_distributed(tensor):
        tensor = tensor.to_local()
    return token, kind_of(tensor.dtype, tuple(tensor.shape)), False


class StorageAlive:
    """A check whether a storage still exists. It keeps the address from being reused."""

    __slots__ = ("_reference",)

    _expired = torch.UntypedStorage._expired
    _free = torch.UntypedStorage._free_weak_ref  # still available when torch has been torn down at exit

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: int = storage._weak_ref()

    def __call__(self) -> bool:
        return not self._expired(self._reference)

    def __deepcopy__(self, memo: object) -> StorageAlive:
        return self  # the reference must be freed once

    def __del__(self) -> None:
        self._free(self._reference)


class StorageHold:
    """Keeps the addresses of many storages from being reused, without an object for each."""

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
        return self  # each reference must be freed once

    def __del__(self) -> None:
        self.clear()

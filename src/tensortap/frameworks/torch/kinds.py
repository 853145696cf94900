"""The kinds of plain torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod

import torch

from tensortap.frameworks.tensor_kind import TensorKind
from tensortap.frameworks.torch.tensors import NAMES

__all__ = ["KindTable", "kind_of"]

_MOST = 10_000


class KindTable:
    """One object for each dtype and shape in use in host memory.

    `layouts` returns the dtypes that the kernel reads as they are, with `TensorKind.layout`.
    """

    def __init__(self, layouts: Callable[[], Mapping[torch.dtype, int]]) -> None:
        self._layouts = layouts
        self._kinds: dict[tuple[torch.dtype, tuple[int, ...]], TensorKind] = {}

    def of(self, tensor: torch.Tensor) -> TensorKind | None:
        """Return the kind of a tensor with elements; None if no kernel reads it as it is."""
        known = self._kinds.get(where := (tensor.dtype, tuple(tensor.shape)))
        if known is not None:
            return known
        layout = self._layouts().get(tensor.dtype)
        if layout is None or tensor.layout is not torch.strided or not (elements := tensor.numel()):
            return None
        if len(self._kinds) == _MOST:  # shapes keep changing; kinds in use stay where they are in use
            self._kinds.clear()
        kind = self._kinds[where] = TensorKind(*where, NAMES[tensor.dtype], elements, tensor.nbytes, layout)
        return kind


@lru_cache(_MOST)
def kind_of(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorKind:
    """Return the kind of tensors on a device: the same object each time, unless shapes keep changing."""
    elements = prod(shape)
    return TensorKind(dtype, shape, NAMES[dtype], elements, elements * dtype.itemsize)

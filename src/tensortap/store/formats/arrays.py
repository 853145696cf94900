"""Arrays by name, as the parameters of a model at no particular step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tensortap.core.records import Key
from tensortap.store.formats.entries import Array, LoadedTensor, StoredTensor, Summarize, TensorList

__all__ = ["WRAPPERS", "Arrays", "named_arrays"]

Arrays = Mapping[str, Callable[[], Array]]
"""Functions that load an array, by its name. They raise RunUnreadable with the reason alone."""
WRAPPERS = ("state_dict", "model", "model_state_dict", "module")
"""Keys under which training scripts store a state dict among other things. Names of tensors omit them."""


def named_arrays(
    path: Path, arrays: Arrays, info: Mapping[str, Any], summarize: Summarize, notices: Sequence[str] = ()
) -> TensorList:
    """Return the arrays as parameters: 'layers.0.fc1.weight' is the parameter `weight` of `layers.0.fc1`."""
    tensors = []
    for name, load in arrays.items():
        module, _, leaf = name.rpartition(".")
        tensors.append(StoredTensor(Key(0, 0, "state", module, 0, "param", leaf), name, partial(_loaded, load)))
    return TensorList(path, tensors, info, summarize, notices=notices, strict=True, checkpoint=True)


def _loaded(load: Callable[[], Array]) -> LoadedTensor:
    return LoadedTensor(load())

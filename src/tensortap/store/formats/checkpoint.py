"""Checkpoints: safetensors, one file or a folder of shards with its index, and torch's own. No pickle is executed."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap import dtypes
from tensortap.errors import MissingDependency, RunNotFound, RunUnreadable
from tensortap.records import Summary
from tensortap.store.formats.arrays import ArrayRun
from tensortap.store.span import as_array

__all__ = ["is_checkpoint", "open_checkpoint"]

Array = npt.NDArray[Any]
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_PADDLE = (".pdparams", ".pdopt")
_SHARDS = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LONGEST_HEADER = 100 << 20


def is_checkpoint(path: Path) -> bool:
    if path.is_dir():
        return (path / _SHARDS).exists() or (path / _SINGLE).exists()
    return path.suffix in (".safetensors", *_TORCH, *_PADDLE)


def open_checkpoint(path: Path, summarize: Callable[[Array], Summary]) -> ArrayRun:
    """A checkpoint as a run that has parameters only."""
    if not path.exists():
        raise RunNotFound(f"{path} does not exist: no checkpoint to open.")
    if path.suffix in _PADDLE:
        raise RunUnreadable(
            f"{path} is a pickle, which can run any code when it is read, so it is not. Load it with paddle.load where "
            "you trust it, and save it again with safetensors.paddle.save_file."
        )
    try:
        if path.is_dir():
            arrays, kind = dict(_folder(path)), "safetensors folder"
        elif path.suffix == ".safetensors":
            arrays, kind = dict(_safetensors(path)), "safetensors"
        else:
            arrays, kind = _torch(path), "torch"
    except PermissionError as error:
        raise RunUnreadable(f"{error.filename or path} may not be read by you: {error.strerror}.") from error
    info = {"framework": "checkpoint", "model": path.name, "format": "checkpoint", "config": {"kind": kind}, "world": 1}
    return ArrayRun(path, arrays, info, summarize)


def _folder(path: Path) -> Iterator[tuple[str, Callable[[], Array]]]:
    if not (path / _SHARDS).exists():
        yield from _safetensors(path / _SINGLE)
        return
    try:
        files = sorted(set(json.loads((path / _SHARDS).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RunUnreadable(f"{path / _SHARDS} is damaged: {error}") from error
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:  # the index must not name files elsewhere
            raise RunUnreadable(f"{path / _SHARDS} names {name!r}, which is no file beside it.")
        if not (path / name).exists():
            raise RunUnreadable(f"{path / name} is missing, though {_SHARDS} names it.")
        yield from _safetensors(path / name)


def _safetensors(path: Path) -> Iterator[tuple[str, Callable[[], Array]]]:
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise RunUnreadable(f"{path} is no safetensors file, or only the beginning of one.")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise RunUnreadable(f"{path} is no safetensors file: its header is damaged.") from error
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype = dtypes.from_tag(entry["dtype"])
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise RunUnreadable(f"{path}: the entry of {name!r} cannot be read: {error}") from error
        if start + end > size:
            raise RunUnreadable(f"{path} is cut off: {name!r} ends beyond it.")
        view = memoryview(mapped)[start + begin : start + end]
        yield name, partial(as_array, view, dtype, shape)


def _torch(path: Path) -> dict[str, Callable[[], Array]]:
    """A state dict that torch itself reads, tensors only: anything else in the file is refused, not executed."""
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise MissingDependency(f"{path} is torch's own format: pip install torch") from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises anything from RuntimeError to pickle's own
        reason = str(error).strip().partition(". ")[0].partition("\n")[0]
        raise RunUnreadable(
            f"{path} cannot be read as a state dict of tensors alone ({reason[:200]}). "
            "Save model.state_dict(), not the model."
        ) from error
    tensors = dict(_tensors(loaded, torch))
    if not tensors:
        raise RunUnreadable(f"{path} holds no tensors: save model.state_dict().")
    return {name: partial(_as_numpy, tensor, torch) for name, tensor in tensors.items()}


def _tensors(value: Any, torch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors of nested dicts; the usual wrapping of a state dict is no part of the names."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key in ("state_dict", "model", "model_state_dict", "module"):
            if not name and isinstance(value.get(key), Mapping):
                yield from _tensors(value[key], torch)
                return
        for key, part in value.items():
            yield from _tensors(part, torch, f"{name}.{key}" if name else str(key))


def _as_numpy(tensor: Any, torch: Any) -> Array:
    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().contiguous()
    array: Array = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    return array.view(dtypes.numpy_dtype(name)).reshape(tuple(tensor.shape))

"""Checkpoints: safetensors, one file or a folder of shards with its index, torch's and Paddle's own. No code is run."""

from __future__ import annotations

import json
import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import Summary
from tensortap.errors import MissingDependency, RunNotFound, RunUnreadable, TensortapError
from tensortap.store.formats.arrays import WRAPPERS, ArrayRun
from tensortap.store.formats.pickles.paddle import PADDLE_SUFFIXES, read_paddle
from tensortap.store.formats.pickles.refusal import classes_in, holds_pickle, is_pickle, is_torch_file, refused
from tensortap.store.source import as_array

__all__ = ["is_checkpoint", "open_checkpoint", "safetensors_arrays"]

Array = npt.NDArray[Any]
Arrays = dict[str, Callable[[], Array]]
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_SHARDS = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LONGEST_HEADER = 100 << 20


def is_checkpoint(path: Path) -> bool:
    if path.is_dir():
        return (path / _SHARDS).exists() or (path / _SINGLE).exists()
    return path.suffix in (".safetensors", *_TORCH, *PADDLE_SUFFIXES) or is_pickle(path)


def open_checkpoint(path: Path, summarize: Callable[[Array], Summary]) -> ArrayRun:
    """A checkpoint as a run that has parameters only."""
    if not path.exists():
        raise RunNotFound(f"{path} does not exist: no checkpoint to open.")
    notices: list[str] = []
    try:
        if path.is_dir():
            arrays, notices = _folder(path)
            kind = "safetensors folder"
        elif path.suffix == ".safetensors" and not holds_pickle(path):
            arrays, kind = dict(safetensors_arrays(path)), "safetensors"
        elif path.suffix in PADDLE_SUFFIXES and not is_torch_file(path):
            arrays, notices = read_paddle(path)
            kind = "paddle"
        else:
            arrays, kind = _torch(path), "torch"
    except TensortapError:
        raise
    except OSError as error:
        raise RunUnreadable(f"{error.filename or path} cannot be read: {error.strerror}.") from error
    info = {"framework": "checkpoint", "model": path.name, "format": "checkpoint", "config": {"kind": kind}, "world": 1}
    return ArrayRun(path, arrays, info, summarize, notices)


def _folder(path: Path) -> tuple[Arrays, list[str]]:
    """All that the shards hold, and what they should hold and do not."""
    if not (path / _SHARDS).exists():
        return dict(safetensors_arrays(path / _SINGLE)), []
    try:
        places = json.loads((path / _SHARDS).read_text())["weight_map"]
        files = sorted(set(places.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RunUnreadable(f"{path / _SHARDS} is damaged: {error}") from error
    found: Arrays = {}
    for name in files:
        # The index must not name files elsewhere.
        if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or "\0" in name:
            raise RunUnreadable(f"{path / _SHARDS} names {name!r}, which is no file beside it.")
        if not (path / name).exists():
            raise RunUnreadable(f"{path / name} is missing, though {_SHARDS} names it.")
        found.update(safetensors_arrays(path / name))
    lost = sorted(map(str, places.keys() - found.keys()))
    return found, [f"{_SHARDS} names tensors that no file holds: {', '.join(lost[:5])}"] if lost else []


def safetensors_arrays(path: Path) -> Iterator[tuple[str, Callable[[], Array]]]:
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise RunUnreadable(f"{path} is no safetensors file, or only the beginning of one.")
        try:
            entries = json.loads(file.read(length))
        except (ValueError, RecursionError):
            entries = None
        if not isinstance(entries, dict):
            raise RunUnreadable(f"{path} is no safetensors file: its header is damaged.")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    entries.pop("__metadata__", None)
    start = 8 + length
    for name, entry in entries.items():
        dtype, shape, begin, end = _checked(path, name, entry)
        if start + end > size:
            raise RunUnreadable(f"{path} is cut off: {name!r} ends beyond it.")
        view = memoryview(mapped)[start + begin : start + end]
        yield name, partial(as_array, view, dtype, shape)


def _checked(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and place that an entry of a header says, if they can be true."""
    try:
        dtype = dtypes.from_tag(entry["dtype"])
    except (KeyError, TypeError) as error:
        raise RunUnreadable(f"{path}: the dtype of {name!r} is not known: {error}") from error
    try:
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        if not whole or end - begin != prod(shape) * dtypes.numpy_dtype(dtype).itemsize:
            raise ValueError(f"{entry['shape']} at {entry['data_offsets']} cannot be")
    except (KeyError, TypeError, ValueError) as error:
        raise RunUnreadable(f"{path} is damaged in the entry of {name!r}: {error}") from error
    return dtype, shape, begin, end


def _torch(path: Path) -> Arrays:
    """A state dict that torch itself reads, tensors only: anything else in the file is refused, not executed."""
    if is_pickle(path) and not is_torch_file(path):
        raise refused(path)
    if path.suffix == ".safetensors" and not classes_in(path):  # torch.load believes the ending
        raise RunUnreadable(
            f"{path} is a file of torch.save, not a safetensors file: rename it to {path.with_suffix('.pt').name}."
        )
    try:
        torch = import_module("torch")
    except ImportError as error:
        if is_torch_file(path) and classes_in(path):
            raise refused(path) from error
        raise MissingDependency(f"{path} is torch's own format: pip install torch") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how the file was written, which is not for its reader to mend
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # torch raises anything from RuntimeError to pickle's own
        reason = str(error).strip().partition(". ")[0].partition("\n")[0]
        if is_torch_file(path):
            raise refused(path, reason[:200]) from error
        raise RunUnreadable(
            f"{path} cannot be read as a state dict of tensors alone ({reason[:200] or 'it is damaged'}). "
            "Save model.state_dict(), not the model."
        ) from error
    tensors = dict(_tensors(loaded, torch))
    if not tensors:
        raise RunUnreadable(f"{path} holds no tensors: save model.state_dict().")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta or _dtype(tensor) not in dtypes.NAMES:
            what = "without values" if tensor.is_meta else f"{tensor.layout} of {tensor.dtype}".replace("torch.", "")
            raise RunUnreadable(f"{path}: {name} cannot be compared; it is a tensor {what}.")
    return {name: partial(_as_numpy, tensor, torch) for name, tensor in tensors.items()}


def _tensors(value: Any, torch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors of nested dicts; the usual wrapping of a state dict is no part of the names."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key in WRAPPERS:
            if not name and isinstance(value.get(key), Mapping):
                yield from _tensors(value[key], torch)
                return
        for key, part in value.items():
            yield from _tensors(part, torch, f"{name}.{key}" if name else str(key))


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_numpy(tensor: Any, torch: Any) -> Array:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    array: Array = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    return array.view(dtypes.numpy_dtype(_dtype(tensor))).reshape(tuple(tensor.shape))

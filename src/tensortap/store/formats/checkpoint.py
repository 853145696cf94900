"""Checkpoints: safetensors, one file or a folder of shards with its index, torch's and Paddle's own. No code is run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np

from tensortap.core import dtypes
from tensortap.errors import MissingDependency, RunNotFound, RunUnreadable, TensortapError, shorten
from tensortap.store.formats.arrays import WRAPPERS, named_arrays
from tensortap.store.formats.entries import Array, Summarize, TensorList
from tensortap.store.formats.pickles.paddle import PADDLE_SUFFIXES, read_paddle
from tensortap.store.formats.pickles.refusal import classes_in, holds_pickle, is_pickle, is_torch_file, refused
from tensortap.store.formats.safetensors import read_safetensors
from tensortap.store.source import LocalFiles, read_json

__all__ = ["open_source", "recognizes"]

Arrays = dict[str, Callable[[], Array]]
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_SHARDS = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DEEPEST = 64
_MOST_VALUES = 1_000_000


def recognizes(path: Path) -> bool:
    """Return whether a path is a checkpoint, by its ending or its content, or a folder that holds one."""
    if path.is_dir():
        return (path / _SHARDS).exists() or (path / _SINGLE).exists()
    return path.suffix in (".safetensors", *_TORCH, *PADDLE_SUFFIXES) or is_pickle(path)


def open_source(path: Path, summarize: Summarize) -> TensorList:
    """Open a checkpoint as a run that has parameters only."""
    if not path.exists():
        raise RunNotFound(f"{path} does not exist: no checkpoint to open.")
    notices: list[str] = []
    # No root: caches of model hubs link to files outside of the folder.
    files = LocalFiles()
    try:
        if path.is_dir():
            arrays, notices = _folder(path, files)
            kind = "safetensors folder"
        elif path.suffix == ".safetensors" and not holds_pickle(path):
            arrays, kind = read_safetensors(files, str(path)), "safetensors"
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
    return named_arrays(path, arrays, info, summarize, notices)


def _folder(path: Path, files: LocalFiles) -> tuple[Arrays, list[str]]:
    """Return the tensors of the shards, and notices of tensors that the index names and no shard holds."""
    if not (path / _SHARDS).exists():
        return read_safetensors(files, str(path / _SINGLE)), []
    try:
        places = read_json(files, str(path / _SHARDS))["weight_map"]
        names = sorted(set(places.values()))
    except RunUnreadable:
        raise
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RunUnreadable(f"{path / _SHARDS} is damaged: {shorten(str(error))}") from error
    found: Arrays = {}
    for name in names:
        # The index must not name files elsewhere.
        if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or "\0" in name:
            raise RunUnreadable(f"{path / _SHARDS} names {shorten(str(name))!r}, which is not a file of the folder.")
        if not (path / name).exists():
            raise RunUnreadable(f"{path / name} is missing, though {_SHARDS} names it.")
        found.update(read_safetensors(files, str(path / name)))
    lost = [shorten(str(name)) for name in sorted(map(str, places.keys() - found.keys()))[:5]]
    return found, [f"{_SHARDS} names tensors that no file holds: {', '.join(lost)}"] if lost else []


def _torch(path: Path) -> Arrays:
    """Return the tensors of a file that torch reads. Anything else in the file is refused, not executed."""
    if is_pickle(path) and not is_torch_file(path):
        raise refused(path)
    if path.suffix == ".safetensors" and not classes_in(path):  # torch.load trusts the ending
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
            warnings.simplefilter("ignore")  # about how the file was written, which its reader cannot change
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
    try:
        tensors = dict(_StateDict(torch).tensors(loaded))
    except RunUnreadable as error:
        raise RunUnreadable(f"{path} cannot be read: {error}") from error
    if not tensors:
        raise RunUnreadable(f"{path} holds no tensors: save model.state_dict().")
    for name, tensor in tensors.items():
        if problem := _problem(tensor, torch):
            raise RunUnreadable(f"{path}: {shorten(name)} cannot be compared; it is a tensor {problem}.")
    return {name: partial(_as_numpy, tensor, torch) for name, tensor in tensors.items()}


class _StateDict:
    """Finds the tensors of nested dicts. The usual wrapping of a state dict is not part of their names."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._open: set[int] = set()
        self._seen = 0

    def tensors(self, value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
        """Yield names and tensors. Raise RunUnreadable if a dict contains itself, or if they are nested too deeply."""
        self._seen += 1
        if self._seen > _MOST_VALUES:
            raise RunUnreadable(f"it holds more than {_MOST_VALUES:,} values.")
        if isinstance(value, self._torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            if id(value) in self._open or len(self._open) >= _DEEPEST:
                raise RunUnreadable(f"one of its dicts contains itself, or dicts are nested over {_DEEPEST} deep.")
            self._open.add(id(value))
            wrapped = next((key for key in WRAPPERS if not name and isinstance(value.get(key), Mapping)), None)
            parts = [("", value[wrapped])] if wrapped is not None else value.items()
            for key, part in parts:
                yield from self.tensors(part, f"{name}.{key}" if name else str(key))
            self._open.remove(id(value))


def _problem(tensor: Any, torch: Any) -> str:
    """Return why a tensor cannot be read; an empty text if it can."""
    if tensor.is_meta:
        return "without values"
    if tensor.layout != torch.strided or _dtype(tensor) not in dtypes.NAMES:
        return f"{tensor.layout} of {tensor.dtype}".replace("torch.", "")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return "that shows the same elements repeatedly, of a size that its file does not have"
    return ""


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_numpy(tensor: Any, torch: Any) -> Array:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    array: Array = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    return array.view(dtypes.numpy_dtype(_dtype(tensor))).reshape(tuple(tensor.shape))

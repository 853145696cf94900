"""Paddle's own checkpoints, .pdparams and .pdopt, read without paddle. They are pickles, whose code is not run.

`paddle.save` writes a state dict as NumPy arrays by name. In nested dicts, as an optimizer has, each tensor is a pair
(name, array). Numbers, as a learning rate scheduler keeps, become small arrays, so that a comparison covers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.errors import RunUnreadable
from tensortap.store.formats.arrays import WRAPPERS
from tensortap.store.formats.pickles.machine import read_pickle
from tensortap.store.formats.pickles.values import PickledArray, PickleRefused
from tensortap.store.source import LocalFiles

__all__ = ["PADDLE_SUFFIXES", "read_paddle"]

Array = npt.NDArray[Any]
Tree: TypeAlias = "dict[str, _Leaf | Tree]"

PADDLE_SUFFIXES = (".pdparams", ".pdopt")
_NAMES = "StructuredToParameterName@@"
_SLICES = "UnpackBigParamInfor@@"
_DEEPEST = 64
_MOST_TENSORS = 250_000
_MOST_REPEATED = 16
"""Upper bound on the size of the named tensors of a file, as a multiple of its own size. More needs one array under
many names.
"""
_FEW = 3


def read_paddle(path: Path) -> tuple[dict[str, Callable[[], Array]], list[str]]:
    """Return the tensors of a checkpoint by name, loaded when asked for, and notices about what the format omits."""
    files = LocalFiles()
    size = files.size(str(path))
    if not size:
        raise RunUnreadable(f"{path} is empty: no checkpoint to open.")
    data = files.view(str(path), 0, size)
    try:
        value, end = read_pickle(data)
        found, notices = _contents(value, size)
    except PickleRefused as error:
        raise RunUnreadable(
            f"{path} cannot be read as a checkpoint of Paddle: {error}. Save layer.state_dict() or "
            "optimizer.state_dict() with paddle.save."
        ) from error
    if not found:
        raise RunUnreadable(f"{path} holds no tensors: save layer.state_dict() with paddle.save.")
    if end < size:
        notices.append(f"{size - end:,} bytes follow the checkpoint in its file and were not read")
    return {name: partial(_load, leaf) for name, leaf in found.items()}, notices


def _load(leaf: _Leaf) -> Array:
    try:
        return leaf.load()
    except PickleRefused as error:
        raise RunUnreadable(f"it is damaged: {error}") from error


def _contents(value: Any, size: int) -> tuple[dict[str, _Leaf], list[str]]:
    """Return the tensors in the value of a pickle of `size` bytes, and notices."""
    notices = []
    if type(value) is dict:
        value = _rejoined(value)
        wrapper = next((key for key in WRAPPERS if type(value.get(key)) is dict), None)
        if wrapper is not None:
            if others := [str(key) for key in value if key != wrapper]:
                notices.append(f"{_few(others)} next to {wrapper!r} in the checkpoint: not read")
            value = value[wrapper]
    survey = _Survey()
    tree = survey.of(value, "")
    found: dict[str, _Leaf] = {}
    total = 0
    for name, leaf in _flat({"tensor": tree} if isinstance(tree, _Leaf) else tree or {}):
        if name in found:
            raise PickleRefused(f"two of its tensors are called {name!r}")
        found[name] = leaf
        total += leaf.nbytes
        if len(found) > _MOST_TENSORS or total > _MOST_REPEATED * max(size, 1 << 20):
            raise PickleRefused("it names the same data so often that it would never end")
    return found, [*notices, *_unknown_dtypes(found), *survey.notices]


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A tensor: one array, several slices of one, or plain numbers."""

    parts: Sequence[PickledArray | Array]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """The dtype in the file."""
        first = self.parts[0]
        return first.dtype if isinstance(first, PickledArray) else dtypes.name_of(first.dtype)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def load(self) -> Array:
        arrays = [part.load() if isinstance(part, PickledArray) else part for part in self.parts]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays).reshape(self.shape)
        return whole.view(dtypes.numpy_dtype("bfloat16")) if whole.dtype == np.uint16 else whole


class _Survey:
    """Reduces nested containers to the tensors and numbers in them. Each container is visited once."""

    def __init__(self) -> None:
        self._known: dict[int, _Leaf | Tree | None] = {}
        self._open: set[int] = set()
        self._ignored: list[str] = []

    @property
    def notices(self) -> list[str]:
        return [f"{_few(self._ignored)}: neither tensors nor numbers, so not read"] if self._ignored else []

    def of(self, value: Any, name: str, depth: int = 0) -> _Leaf | Tree | None:
        """Return the content of a value; None if it is neither a tensor nor a number."""
        if isinstance(value, (PickledArray, _Leaf)):
            return value if isinstance(value, _Leaf) else _leaf_of(value)
        if type(value) not in (dict, list, tuple):
            found = _numbers([value], ())
            if found is None and value is not None:
                self._ignored.append(name or "the value")
            return found
        if depth >= _DEEPEST:
            raise PickleRefused(f"its containers are nested more than {_DEEPEST} deep")
        if id(value) in self._open:
            raise PickleRefused("one of its containers contains itself")
        if id(value) not in self._known:
            self._open.add(id(value))
            self._known[id(value)] = self._inside(value, name, depth)
            self._open.remove(id(value))
        return self._known[id(value)]

    def _inside(self, value: Any, name: str, depth: int) -> _Leaf | Tree | None:
        if type(value) is tuple and len(value) == 2 and type(value[0]) is str and isinstance(value[1], PickledArray):
            return _leaf_of(value[1])  # how paddle.save writes a tensor: (its name, the array)
        if type(value) is not dict:
            if value and (numbers := _numbers(value, (len(value),))) is not None:
                return numbers
            value = dict(enumerate(value))
        tree: Tree = {}
        for key, part in value.items():
            if (found := self.of(part, f"{name}.{key}" if name else str(key), depth + 1)) is not None:
                if str(key) in tree:
                    raise PickleRefused(f"two of its tensors are called {key!r}")
                tree[str(key)] = found
        return tree or None


def _leaf_of(array: PickledArray) -> _Leaf:
    if not array.complete:
        raise PickleRefused("it creates an array and never says what is in it")
    return _Leaf((array,), array.shape)


def _numbers(values: Sequence[Any], shape: tuple[int, ...]) -> _Leaf | None:
    """Return plain numbers as one array; None if one of them is not a number."""
    kinds = {type(value) for value in values}
    if not kinds <= {bool, int, float, complex}:
        return None
    if int in kinds and not all(-(1 << 63) <= value < 1 << 63 for value in values if type(value) is int):
        return None
    dtype = next(dtype for kind, dtype in _NUMBERS.items() if kind in kinds)
    return _Leaf((np.array(values, dtype).reshape(shape),), shape)


_NUMBERS = {complex: np.complex128, float: np.float64, int: np.int64, bool: np.bool_}


def _flat(tree: Tree, name: str = "") -> Iterator[tuple[str, _Leaf]]:
    for key, part in tree.items():
        full = f"{name}.{key}" if name else key
        if isinstance(part, _Leaf):
            yield full, part
        else:
            yield from _flat(part, full)


def _rejoined(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return a state dict without Paddle's own entries. Protocols 2 and 3 hold tensors of over a gigabyte in slices."""
    found = {key: value for key, value in state.items() if key not in (_NAMES, _SLICES)}
    slices = state.get(_SLICES, {})
    if type(slices) is not dict:
        raise PickleRefused(f"its entry {_SLICES} is damaged")
    for name, info in slices.items():
        known = info if type(info) is dict else {}
        names, shape = known.get("slices"), known.get("OriginShape")
        if type(names) is not list or not names or not isinstance(shape, (tuple, list)):
            raise PickleRefused(f"its entry {_SLICES} is damaged")
        found[name] = _joined(name, [found.pop(part, None) if type(part) is str else None for part in names], shape)
    return found


def _joined(name: Any, parts: Sequence[Any], shape: Sequence[Any]) -> _Leaf:
    arrays = [part for part in parts if isinstance(part, PickledArray) and part.complete]
    whole = all(type(size) is int and size >= 0 for size in shape)
    if len(arrays) != len(parts) or not whole or len({(array.dtype, len(array.shape)) for array in arrays}) != 1:
        raise PickleRefused(f"the slices of {name!r} are missing or damaged")
    if len(arrays[0].shape) != 1 or sum(array.shape[0] for array in arrays) != prod(shape):
        raise PickleRefused(f"the slices of {name!r} do not make up a tensor of {'×'.join(map(str, shape))}")
    return _Leaf(tuple(arrays), tuple(shape))


def _unknown_dtypes(found: dict[str, _Leaf]) -> list[str]:
    """Return notices about dtypes that the file does not record: it has only NumPy's."""
    notices = []
    if names := [name for name, leaf in found.items() if leaf.dtype == "uint16"]:
        notices.append(f"{_few(names)}: saved as uint16, which is how Paddle writes bfloat16; read as bfloat16")
    if names := [name for name, leaf in found.items() if leaf.dtype == "int8"]:
        notices.append(f"{_few(names)}: saved as int8, which is also how Paddle writes float8; read as int8")
    return notices


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FEW:,} more" if len(names) > _FEW else ""
    return ", ".join(name[:100] for name in names[:_FEW]) + more

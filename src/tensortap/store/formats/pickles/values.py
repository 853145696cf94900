"""The values that a pickle of arrays may hold, and the only functions that one may name.

Nothing is imported or called on behalf of a pickle. A name such as `numpy.dtype` selects one of the functions below.
They check their arguments and build plain data. Array contents stay in the file until `PickledArray.load`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes

__all__ = ["Payload", "PickleRefused", "PickledArray", "PickledDtype", "PickledName", "find_name", "is_plain_key"]

_CHUNK = 1 << 24
_MOST_AXES = 32
_ORDERS = ("<", "=", ">", "|")


class PickleRefused(ValueError):
    """The pickle is damaged, or holds something that is not read from untrusted files."""


@dataclass(frozen=True, eq=False)
class Payload:
    """A range of bytes within the file."""

    data: memoryview
    utf8: bool = False
    """Whether the file holds the bytes as UTF-8 text with one character per byte, as pickle protocol 2 does."""

    @cached_property
    def size(self) -> int:
        """Number of bytes after decoding."""
        if not self.utf8:
            return len(self.data)
        starts = 0
        for begin in range(0, len(self.data), _CHUNK):
            part = np.frombuffer(self.data[begin : begin + _CHUNK], np.uint8)
            starts += int(np.count_nonzero((part & 0xC0) != 0x80))
        return starts

    def read(self) -> bytes | memoryview:
        """Return the decoded bytes; a view of the file where possible."""
        if not self.utf8:
            return self.data
        try:
            return str(self.data, "utf-8").encode("latin-1")
        except UnicodeError as error:
            raise PickleRefused("an array's data is not valid text of one character per byte") from error


class PickledDtype:
    """A NumPy dtype as a pickle describes it: first its code, then, in a second instruction, its byte order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._swapped = False

    def build(self, state: Any) -> None:
        """Accept a byte order; refuse fields, subarrays and metadata."""
        if type(state) is not tuple or len(state) < 5 or state[1] not in _ORDERS or state[2:5] != (None, None, None):
            raise PickleRefused("a dtype has fields, or a state that NumPy does not write for plain numbers")
        self._swapped = state[1] == ">"

    @property
    def numpy(self) -> np.dtype[Any]:
        found = dtypes.numpy_dtype(self.name)
        return found.newbyteorder(">") if self._swapped else found


class PickledArray:
    """An array whose description was read and whose elements were not."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self._dtype: PickledDtype | None = None
        self._payload: Payload | None = None
        self._order: Literal["C", "F"] = "C"
        self._axes: tuple[int, ...] = ()

    def build(self, state: Any) -> None:
        """Take (version, shape, dtype, is_fortran, data), which is how NumPy describes an array to pickle."""
        if type(state) is not tuple or len(state) != 5 or state[0] not in (0, 1):
            raise PickleRefused("an array has a state that NumPy does not write")
        _, shape, dtype, columns_first, data = state
        self.fill(shape, dtype, data, "F" if columns_first else "C")

    def fill(self, shape: Any, dtype: Any, data: Any, order: Any = "C", axes: Any = ()) -> None:
        """Check the description against the bytes that the file has for it. `axes` are transposed after reading."""
        if not isinstance(dtype, PickledDtype):
            raise PickleRefused("an array names no dtype")
        sizes = shape if type(shape) is tuple else ()
        whole = all(type(size) is int and 0 <= size < 1 << 48 for size in sizes)
        if type(shape) is not tuple or not whole or len(sizes) > _MOST_AXES:
            raise PickleRefused("an array has an impossible shape")
        payload = as_payload(data)
        if prod(sizes) * dtype.numpy.itemsize != payload.size:
            words = "×".join(map(str, sizes)) or "one element"
            raise PickleRefused(
                f"an array of {words} {dtype.name} has {payload.size:,} bytes of data, which do not fit"
            )
        if order not in ("C", "F") or type(axes) is not tuple:
            raise PickleRefused("an array's elements have an order that NumPy does not write")
        if axes and (any(type(axis) is not int for axis in axes) or sorted(axes) != list(range(len(sizes)))):
            raise PickleRefused("an array's axes are not a permutation")
        self.shape = tuple(sizes[axis] for axis in axes) if axes else sizes
        self._dtype, self._payload, self._order, self._axes = dtype, payload, order, axes

    @property
    def complete(self) -> bool:
        """Whether the pickle described the array as well as creating it."""
        return self._payload is not None

    @property
    def dtype(self) -> str:
        return "" if self._dtype is None else self._dtype.name

    @property
    def nbytes(self) -> int:
        return 0 if self._payload is None else self._payload.size

    def load(self) -> npt.NDArray[Any]:
        """Return the elements in this machine's byte order."""
        assert self._payload is not None and self._dtype is not None
        dtype = self._dtype.numpy
        if not self._payload.size:
            return np.empty(self.shape, dtype.newbyteorder("="))
        flat: npt.NDArray[Any] = np.frombuffer(self._payload.read(), dtype)
        if flat.size != prod(self.shape):
            raise PickleRefused("an array's data is not valid text of one character per byte")
        if self._axes:
            before = [0] * len(self._axes)
            for size, axis in zip(self.shape, self._axes, strict=True):
                before[axis] = size
            flat = flat.reshape(before).transpose(self._axes)
        else:
            flat = flat.reshape(self.shape, order=self._order)
        return flat if dtype.isnative else flat.astype(dtype.newbyteorder("="))


def as_payload(data: Any) -> Payload:
    """Return the bytes of an array, which a pickle has as bytes or as a Python 2 string."""
    if isinstance(data, Payload):
        return data
    if type(data) is str:
        return Payload(memoryview(_latin1(data)))
    raise PickleRefused("an array's elements are Python objects, not bytes")


def is_plain_key(key: Any) -> bool:
    """Return whether a dict or set may hold a key. Hashing deeply nested tuples could exhaust the C stack."""
    if type(key) is tuple:
        return len(key) < 100 and all(type(part) in (str, int) for part in key)
    if type(key) is int:
        return abs(key) < 1 << 64  # larger ones can be chosen to have the same hash
    return key is None or type(key) in (str, float, bool)


class PickledName(NamedTuple):
    """A module-level name that a pickle refers to, and what tensortap does where the pickle calls it."""

    name: str
    call: Callable[[tuple[Any, ...]], Any]


def find_name(module: Any, name: Any) -> PickledName:
    """Resolve a name from the allow-list; raise PickleRefused for all others."""
    if type(module) is not str or type(name) is not str:
        raise PickleRefused("a global has no name")
    if module == "ml_dtypes" and name in dtypes.NAMES:
        return PickledName(f"ml_dtypes.{name}", _never(f"ml_dtypes.{name}"))
    module = _SAME.get(module, module)
    if (call := _ALLOWED.get((module, name))) is None:
        full = f"{module}.{name}"
        raise PickleRefused(
            f"it refers to {full[:200]}, which is not on the list of what a checkpoint may hold: "
            "arrays, numbers, text, and plain containers"
        )
    return PickledName(f"{module}.{name}", call)


# --- what each allowed name does -----------------------------------------------------------------------------------
def _never(name: str) -> Callable[[tuple[Any, ...]], Any]:
    def call(arguments: tuple[Any, ...]) -> Any:
        raise PickleRefused(f"it calls {name}, which is not done from a file")

    return call


def _reconstruct(arguments: tuple[Any, ...]) -> PickledArray:
    kind = arguments[0] if arguments else None
    if len(arguments) != 3 or not isinstance(kind, PickledName) or kind.name != "numpy.ndarray":
        raise PickleRefused("it creates an array that is not a plain numpy.ndarray")
    return PickledArray()


def _frombuffer(arguments: tuple[Any, ...]) -> PickledArray:
    """`_frombuffer(data, dtype, shape, order)`, or with order "K" and the axes to transpose as a fifth argument."""
    if len(arguments) not in (4, 5):
        raise PickleRefused("it creates an array from a buffer in a way that NumPy does not write")
    data, dtype, shape, order, *rest = arguments
    axes = rest[0] if rest and rest[0] is not None else ()
    array = PickledArray()
    array.fill(shape, dtype, data, "C" if order == "K" and axes else order, axes)
    return array


def _scalar(arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 2:
        raise PickleRefused("it creates a NumPy scalar in a way that NumPy does not write")
    array = PickledArray()
    array.fill((), *arguments)
    return array.load()[()].item()


def _dtype(arguments: tuple[Any, ...]) -> PickledDtype:
    code = arguments[0] if arguments else None
    if isinstance(code, PickledName) and code.name.startswith("ml_dtypes."):
        return PickledDtype(code.name.removeprefix("ml_dtypes."))
    if type(code) is not str or code not in _CODES:
        shown = repr(code)[:40] if type(code) is str else type(code).__name__
        raise PickleRefused(f"it holds an array of dtype {shown}, which is not a number type that tensortap reads")
    return PickledDtype(_CODES[code])


def _encode(arguments: tuple[Any, ...]) -> Payload:
    """`_codecs.encode(text, "latin1")`: how protocol 2 writes bytes."""
    if len(arguments) != 2 or arguments[1] not in ("latin1", "latin-1"):
        raise PickleRefused("it encodes text other than as Latin-1")
    text = arguments[0]
    if type(text) is str:
        return Payload(memoryview(_latin1(text)))
    if isinstance(text, Payload):
        return text
    raise PickleRefused("it encodes something that is not text")


def _latin1(text: str) -> bytes:
    try:
        return text.encode("latin-1")
    except UnicodeError as error:
        raise PickleRefused("an array's data is not valid text of one character per byte") from error


def _ordered_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    """`OrderedDict()`, or as Python 2 writes it, `OrderedDict([[key, value], ...])`."""
    if not arguments:
        return {}
    found: dict[Any, Any] = {}
    if len(arguments) != 1 or type(arguments[0]) not in (list, tuple):
        raise PickleRefused("it creates an OrderedDict from something that is not a list of pairs")
    for pair in arguments[0]:
        if type(pair) not in (list, tuple) or len(pair) != 2 or not is_plain_key(pair[0]):
            raise PickleRefused("it creates an OrderedDict from something that is not a list of pairs")
        found[pair[0]] = pair[1]
    return found


def _container(kind: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any]:
    def call(arguments: tuple[Any, ...]) -> Any:
        if not arguments:
            return kind()
        if len(arguments) != 1 or type(arguments[0]) not in (list, tuple):
            raise PickleRefused(f"it creates a {kind.__name__} from something that is not a list")
        if kind in (set, frozenset) and not all(map(is_plain_key, arguments[0])):
            raise PickleRefused(f"it creates a {kind.__name__} of something that is not plain")
        return kind(arguments[0])

    return call


def _bytes(arguments: tuple[Any, ...]) -> Payload:
    if not arguments:
        return Payload(memoryview(b""))
    if len(arguments) == 1 and isinstance(arguments[0], Payload):
        return arguments[0]
    raise PickleRefused("it creates bytes from something else")


def _complex(arguments: tuple[Any, ...]) -> complex:
    if len(arguments) != 2 or not all(type(part) is float for part in arguments):
        raise PickleRefused("it creates a complex number from something other than two numbers")
    return complex(*arguments)


def _dense_tensor(arguments: tuple[Any, ...]) -> PickledArray:
    """`eval("data", {"data": array})`: how Paddle writes a DenseTensor. Nothing is evaluated."""
    if len(arguments) == 2 and arguments[0] == "data" and type(arguments[1]) is dict and [*arguments[1]] == ["data"]:
        array = arguments[1]["data"]
        if isinstance(array, PickledArray):
            return array
    raise PickleRefused("it refers to builtins.eval, and not in the one way that Paddle writes a tensor")


_CODES: Mapping[str, str] = {
    dtype.str.lstrip("<|=>"): name for name in dtypes.NAMES if (dtype := dtypes.numpy_dtype(name)).isbuiltin == 1
}
_SAME = {
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
    "__builtin__": "builtins",
}
_ALLOWED: Mapping[tuple[str, str], Callable[[tuple[Any, ...]], Any]] = {
    ("numpy", "ndarray"): _never("numpy.ndarray"),
    ("numpy", "dtype"): _dtype,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): _ordered_dict,
    ("builtins", "tuple"): _container(tuple),
    ("builtins", "list"): _container(list),
    ("builtins", "set"): _container(set),
    ("builtins", "frozenset"): _container(frozenset),
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytes,
    ("builtins", "complex"): _complex,
    ("builtins", "eval"): _dense_tensor,
}

"""Bytes: ranges of named objects, which every reader and the comparison engine read through.

`LocalFiles` implements the contract for files, `store.remote.RemoteFiles` for objects behind a URL. A medium implements
`size` and `read_into`, and `names` if it has folders; everything else follows from these.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.file_io import BINARY, check_regular, read_at
from tensortap.core.machine import PORTABLE
from tensortap.core.records import Location, Record
from tensortap.core.urls import Place, is_url
from tensortap.errors import RunUnreadable, UsageError, shorten
from tensortap.store.format import PARTIAL

__all__ = [
    "AddressedFiles",
    "Bytes",
    "HeldBytes",
    "LocalFiles",
    "Range",
    "SingleFile",
    "as_array",
    "bytes_of_array",
    "cut_off",
    "files_below",
    "kept_location",
    "missing",
    "read_head",
    "read_json",
]

_MOST_OPEN = 64
_LARGEST_JSON = 256 << 20


class Range(NamedTuple):
    """Bytes of a named object."""

    name: str
    offset: int
    nbytes: int


class Bytes(ABC):
    """Ranges of named objects. All methods may be called from any thread.

    A range that an object does not have raises RunUnreadable, and so does an object that cannot be read. An object
    that does not exist raises FileNotFoundError from `size`, so that readers can distinguish it.
    """

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of the object in bytes."""

    @abstractmethod
    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes that begin at `offset`."""

    def read(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Return a range as a read-only copy. Allocate nothing if the object is shorter."""
        if not nbytes:
            return memoryview(b"")
        if offset < 0 or nbytes < 0 or self.size(name) < offset + nbytes:
            raise cut_off(name, offset, nbytes)
        data = bytearray(nbytes)
        self.read_into(name, offset, memoryview(data))
        return memoryview(data).toreadonly()

    def view(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Return a range, read-only: without a copy where the medium can be mapped."""
        return self.read(name, offset, nbytes)

    def stream(self, name: str) -> BinaryIO:
        """Return the object as a seekable file that is open for reading."""
        return io.BufferedReader(_Stream(self, name), 1 << 16)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the entries of a folder, in any order; none if it does not exist."""
        raise NotImplementedError(f"{type(self).__name__} has no folders")

    def exists(self, name: str) -> bool:
        """Return whether the object exists."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def address(self, name: str) -> str:
        """Return the name under which `AddressedFiles` finds the object in any process."""
        return name

    def prefetch(self, ranges: Iterable[Range]) -> None:  # noqa: B027  # local files need no preparation
        """Prepare for reading these ranges soon. Fetch close ones together where each request takes time."""

    def release_pages(self) -> None:  # noqa: B027  # a medium that maps nothing has nothing to release
        """Stop counting the pages of mapped objects as this process's memory. Views stay valid."""

    def close(self) -> None:  # noqa: B027  # a medium that keeps nothing open has nothing to close
        """Release what is open. Views stay valid, and later reads open the objects again."""


class LocalFiles(Bytes):
    """Files by path; below `root` if there is one. The files used last stay open.

    With a root, names are relative to it and must stay inside: a name or a link that leads elsewhere is refused.
    Only regular files are read, since a FIFO or a device may block or never end. A file that is still being written
    is found under its name with PARTIAL behind it.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def size(self, name: str) -> int:
        return self._open(name).size()

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        try:
            file = self._open(name)
        except FileNotFoundError:
            raise missing(self.address(name)) from None
        file.read_into(offset, target)

    def read(self, name: str, offset: int, nbytes: int) -> memoryview:
        try:
            return super().read(name, offset, nbytes)
        except FileNotFoundError:
            raise missing(self.address(name)) from None

    def view(self, name: str, offset: int, nbytes: int) -> memoryview:
        if not nbytes:
            return memoryview(b"")
        try:
            file = self._open(name)
        except FileNotFoundError:
            raise missing(self.address(name)) from None
        return file.view(offset, nbytes)

    def names(self, folder: str = "") -> list[str]:
        try:
            return [entry.name for entry in (self.path(folder) if folder else self._root or Path()).iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def address(self, name: str) -> str:
        return str(self.path(name))

    def path(self, name: str) -> Path:
        """Return the path of a file. Raise RunUnreadable if the name leads out of the root."""
        if self._root is None:
            return Path(name)
        if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
            raise RunUnreadable(f"{self._root}: {shorten(name)!r} is not the name of a file in it.")
        return self._root / name

    def release_pages(self) -> None:
        with self._lock:
            files = list(self._files.values())
        for file in files:
            file.release_pages()

    def close(self) -> None:
        with self._lock:
            self._files.clear()

    def _open(self, name: str) -> _OpenFile:
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = _opened(self.path(name), self._root)
            self._files.move_to_end(name)
            if len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)  # a reader or a view that uses it keeps it alive
            return file


class AddressedFiles(Bytes):
    """Objects by the addresses that any source returns: paths, or URLs. For tasks that run in other processes."""

    def __init__(self) -> None:
        self._local = LocalFiles()
        self._remote: Bytes | None = None

    def size(self, name: str) -> int:
        return self._holding(name).size(name)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self._holding(name).read_into(name, offset, target)

    def read(self, name: str, offset: int, nbytes: int) -> memoryview:
        return self._holding(name).read(name, offset, nbytes)

    def view(self, name: str, offset: int, nbytes: int) -> memoryview:
        return self._holding(name).view(name, offset, nbytes)

    def prefetch(self, ranges: Iterable[Range]) -> None:
        remote = [each for each in ranges if is_url(each.name)]
        if remote:
            self._holding(remote[0].name).prefetch(remote)

    def release_pages(self) -> None:
        self._local.release_pages()

    def close(self) -> None:
        self._local.close()
        if self._remote is not None:
            self._remote.close()

    def _holding(self, name: str) -> Bytes:
        if not is_url(name):
            return self._local
        if self._remote is None:
            from tensortap.store.remote import RemoteFiles  # loads fsspec: only for a URL

            self._remote = RemoteFiles()
        return self._remote


def files_below(place: Place) -> Bytes:
    """Return the objects in a folder, by names relative to it."""
    if isinstance(place, Path):
        return LocalFiles(place)
    from tensortap.store.remote import RemoteFiles  # loads fsspec: only for a URL

    return RemoteFiles(place)


class HeldBytes(Bytes):
    """One object, under any name, that is in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def size(self, name: str) -> int:
        return len(self._data)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        target[:] = self.view(name, offset, len(target))

    def view(self, name: str, offset: int, nbytes: int) -> memoryview:
        if offset < 0 or nbytes < 0 or len(self._data) < offset + nbytes:
            raise cut_off(name, offset, nbytes)
        return self._data[offset : offset + nbytes]


class SingleFile(LocalFiles):
    """One file, under any name: for formats that keep all tensors in one."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def path(self, name: str) -> Path:
        return self._path


class _OpenFile:
    """An open file and, once a view was asked for, its map. Closed when nothing refers to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = _descriptor(path)
        self._map: mmap.mmap | None = None

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", -1)) >= 0:
            os.close(descriptor)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_into(self, offset: int, target: memoryview) -> None:
        done = 0
        try:
            while done < len(target):
                count = read_at(self._descriptor, target[done:], offset + done)
                if not count:
                    raise cut_off(self._path, offset, len(target))
                done += count
        except OSError as error:
            raise RunUnreadable(f"{self._path} cannot be read: {error.strerror}.") from error

    def view(self, offset: int, nbytes: int) -> memoryview:
        # Touching a page behind the end of a file that was cut off since it was mapped kills the process.
        if offset < 0 or nbytes < 0 or self.size() < offset + nbytes:
            raise cut_off(self._path, offset, nbytes)
        mapped = self._map
        try:
            if mapped is None or len(mapped) < offset + nbytes:  # the file may have grown since
                mapped = self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except OSError:  # a file system that maps nothing
            data = bytearray(nbytes)
            self.read_into(offset, memoryview(data))
            return memoryview(data).toreadonly()
        return memoryview(mapped)[offset : offset + nbytes]

    def release_pages(self) -> None:
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED") and not PORTABLE:
            self._map.madvise(mmap.MADV_DONTNEED)


class _Stream(io.RawIOBase):
    """An object as a file, for code that reads files."""

    def __init__(self, source: Bytes, name: str) -> None:
        self._source = source
        self._name = name
        self._size = source.size(name)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if begin + offset < 0:
            raise ValueError("a negative position")
        self._at = begin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        if count:
            self._source.read_into(self._name, self._at, memoryview(buffer)[:count])
        self._at += count
        return count


def read_json(source: Bytes, name: str) -> Any:
    """Parse a JSON object of bounded size. Raise FileNotFoundError, or ValueError with the reason alone."""
    size = source.size(name)
    if size > _LARGEST_JSON:
        raise ValueError(f"it has {size:,} bytes")
    try:
        return json.loads(bytes(source.read(name, 0, size)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_head(path: Path, nbytes: int) -> bytes:
    """Return the first bytes of a regular file; none if it is anything else, or cannot be read."""
    try:
        file = _OpenFile(path)
        data = bytearray(min(nbytes, file.size()))
        file.read_into(0, memoryview(data))
    except (OSError, RunUnreadable):
        return b""
    return bytes(data)


def kept_location(record: Record) -> Location:
    """Return the location of a record's bytes. Raise if they were not kept, or if the index contradicts itself."""
    location = record.location
    if location is None:
        raise UsageError(
            f"{record.key} (rank {record.rank}): only the summary was kept. "
            'Capture with keep="tensors" to have the values.'
        )
    expected = prod(record.shape) * dtypes.numpy_dtype(record.dtype).itemsize
    if location.offset < 0 or location.nbytes != expected:
        raise RunUnreadable(f"{record.key} (rank {record.rank}): the index is damaged; it says {location}.")
    return location


def as_array(view: memoryview, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return bytes as a read-only array; copy them only if they are not aligned."""
    kind = dtypes.numpy_dtype(dtype)
    if not view.nbytes:
        array = np.empty(shape, kind)
    else:
        array = np.frombuffer(view, np.uint8).view(kind).reshape(shape)
        if not array.flags.aligned:
            array = array.copy()
    array.flags.writeable = False
    return array


def bytes_of_array(array: npt.NDArray[Any]) -> memoryview:
    """Return the elements of an array in C order, read-only."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data.toreadonly()


def _opened(path: Path, root: Path | None) -> _OpenFile:
    # The last one again: a file may be finished, and so renamed, between the first attempt and the second.
    for each in (path, path.with_name(path.name + PARTIAL), path):
        if root is not None and not _is_inside(each, root):
            raise RunUnreadable(f"{each} is a link that leads out of {root}: copy the file into the folder.")
        try:
            return _OpenFile(each)
        except FileNotFoundError:
            continue
    raise FileNotFoundError(2, os.strerror(2), str(path))


def _is_inside(path: Path, root: Path) -> bool:
    real, base = os.path.realpath(path), os.path.realpath(root)
    return os.path.commonpath([real, base]) == base


def _descriptor(path: Path) -> int:
    try:
        check_regular(path, path.stat().st_mode)  # before it is opened: that alone may act on a device
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | BINARY)
    except FileNotFoundError:
        raise
    except RunUnreadable:
        raise
    except (OSError, ValueError) as error:  # ValueError: the name holds a NUL
        raise RunUnreadable(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def missing(address: object) -> RunUnreadable:
    """Return the error for an object that the index names and that does not exist."""
    return RunUnreadable(f"{address} is missing: the tensors in it cannot be loaded; their summaries still can.")


def cut_off(name: object, offset: int, nbytes: int) -> RunUnreadable:
    """Return the error for a range that an object does not have."""
    return RunUnreadable(f"{name} is cut off: bytes {offset} to {offset + nbytes} are not there. Was it copied whole?")

"""RemoteFiles: objects behind a URL as `Bytes`, read by ranges with few requests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensortap.core.urls import Url, filesystem, read_error
from tensortap.errors import RunUnreadable, TensortapError
from tensortap.store.format import PARTIAL
from tensortap.store.range_cache import MemoryCache, disk_cache
from tensortap.store.source import Bytes, Range, cut_off, missing

__all__ = ["RemoteFiles", "Traffic", "join_ranges", "traffic"]

GAP = 1 << 20
"""Ranges of one object that are closer than this are read together: a request costs more than these bytes."""
LARGEST = 32 << 20
"""Largest range that is joined from several: requests for parts of a large one run beside each other."""


@dataclass
class Traffic:
    """Requests and bytes of all remote reads of this process."""

    requests: int = 0
    nbytes: int = 0

    def add(self, requests: int, nbytes: int) -> None:
        with _counting:
            self.requests += requests
            self.nbytes += nbytes


traffic = Traffic()
_counting = threading.Lock()


class _Stored(NamedTuple):
    """The size and version of an object."""

    size: int
    version: str


class RemoteFiles(Bytes):
    """Objects below `root`; without one, names are whole URLs.

    The names and sizes of a folder are listed once, and ranges that were read are kept in a bounded cache. `close`
    forgets both. An object that is not finished is found under its name with PARTIAL behind it, as in `LocalFiles`.
    """

    def __init__(self, root: Url | None = None) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._folders: dict[str, list[str]] = {}
        self._stored: dict[str, _Stored] = {}
        self._memory = MemoryCache()
        self._disk = disk_cache()

    def names(self, folder: str = "") -> list[str]:
        with self._lock:
            if folder not in self._folders:
                self._folders[folder] = self._list(folder)
            return self._folders[folder]

    def size(self, name: str) -> int:
        return self._find(self.address(name))[1].size

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        target[:] = self.read(name, offset, len(target))

    def read(self, name: str, offset: int, nbytes: int) -> memoryview:
        if not nbytes:
            return memoryview(b"")
        if offset < 0 or nbytes < 0:
            raise cut_off(name, offset, nbytes)
        address = self.address(name)
        found = self._cached(address, offset, nbytes)
        if found is None:
            (data,) = self._fetch([Range(address, offset, nbytes)])
            found = memoryview(data)
        return found.toreadonly()

    def prefetch(self, ranges: Iterable[Range]) -> None:
        """Read ranges together that are close to each other, and beside each other if they are not."""
        wanted = [Range(self.address(name), offset, nbytes) for name, offset, nbytes in ranges if nbytes > 0]
        wanted = [each for each in wanted if self._cached(*each) is None]
        if wanted:
            self._fetch(join_ranges(wanted))

    def address(self, name: str) -> str:
        return name if self._root is None or "://" in name else (self._root / name).address

    def close(self) -> None:
        with self._lock:
            self._folders.clear()
            self._stored.clear()
            self._memory.clear()

    def _list(self, folder: str) -> list[str]:
        assert self._root is not None
        url = self._root / folder if folder else self._root
        fs, path = filesystem(url)
        try:
            entries = fs.ls(path, detail=True)
        except FileNotFoundError:
            entries = []
        except TensortapError:
            raise
        except Exception as error:
            raise read_error(error, url) from None
        traffic.add(1, 0)
        found = []
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if not name or str(entry["name"]).strip("/") == path.strip("/"):
                continue  # the folder itself: a marker, or an object of the same name
            found.append(name)
            if entry.get("type") != "directory":
                self._stored[(url / name).address] = _described(entry)
        return found

    def _find(self, address: str) -> tuple[str, _Stored]:
        """Return the address and facts of an object, finished or not. Raise FileNotFoundError if there is none."""
        if self._root is not None and address.startswith(f"{self._root.address}/"):
            folder, _, _ = address.removeprefix(f"{self._root.address}/").rpartition("/")
            self.names(folder)
            for each in (address, address + PARTIAL):
                if each in self._stored:
                    return each, self._stored[each]
            raise FileNotFoundError(2, "it does not exist", str(Url(address)))
        for each in (address, address + PARTIAL):
            if each not in self._stored:
                fs, path = filesystem(Url(each))
                traffic.add(1, 0)
                try:
                    self._stored[each] = _described(fs.info(path))
                except FileNotFoundError:
                    continue
                except Exception as error:
                    raise read_error(error, Url(each)) from None
            return each, self._stored[each]
        raise FileNotFoundError(2, "it does not exist", str(Url(address)))

    def _cached(self, address: str, offset: int, nbytes: int) -> memoryview | None:
        found = self._memory.get(address, offset, nbytes)
        if found is None and self._disk is not None and (name := self._version(address)):
            found = self._disk.get(name, offset, nbytes)
        return found

    def _version(self, address: str) -> str:
        """Return a name of this object as it is now; none if the store does not distinguish versions."""
        try:
            _, stored = self._find(address)
        except FileNotFoundError:
            return ""
        return f"{address}\n{stored.size}\n{stored.version}" if stored.version else ""

    def _fetch(self, ranges: Sequence[Range]) -> list[bytes]:
        """Read ranges beside each other, and keep them."""
        stored = [self._stored_address(each.name) for each in ranges]
        found = _cat(stored, ranges)
        for place, each in enumerate(found):
            if isinstance(each, FileNotFoundError) and not stored[place].endswith(PARTIAL):
                stored[place] += PARTIAL
                (found[place],) = _cat([stored[place]], [ranges[place]])
        for (address, offset, nbytes), data in zip(ranges, found, strict=True):
            if isinstance(data, FileNotFoundError):
                raise missing(Url(address))
            if isinstance(data, TensortapError):
                raise data
            if isinstance(data, BaseException):
                raise read_error(data, Url(address)) from None
            if len(data) != nbytes:
                raise cut_off(Url(address), offset, nbytes)
            self._memory.add(address, offset, data)
            if self._disk is not None and (name := self._version(address)):
                self._disk.add(name, offset, data)
        return found

    def _stored_address(self, address: str) -> str:
        return address + PARTIAL if address not in self._stored and address + PARTIAL in self._stored else address


def join_ranges(ranges: Iterable[Range], gap: int = GAP, largest: int = LARGEST) -> list[Range]:
    """Return ranges that contain all given ones: those of one object that are closer than `gap` become one.

    >>> join_ranges([Range("a", 0, 10), Range("a", 15, 5), Range("b", 0, 1)], gap=8)
    [Range(name='a', offset=0, nbytes=20), Range(name='b', offset=0, nbytes=1)]
    """
    joined: list[Range] = []
    for name, offset, nbytes in sorted(set(ranges)):
        if joined and joined[-1].name == name:
            begin, end = joined[-1].offset, joined[-1].offset + joined[-1].nbytes
            whole = max(end, offset + nbytes) - begin
            if offset < end or (offset - end < gap and whole <= largest):
                joined[-1] = Range(name, begin, whole)
                continue
        joined.append(Range(name, offset, nbytes))
    return joined


def _cat(addresses: Sequence[str], ranges: Sequence[Range]) -> list[Any]:
    """Return the bytes of each range, or the error."""
    fs, _ = filesystem(Url(addresses[0]))
    paths = [fs._strip_protocol(address) for address in addresses]
    starts, ends = [each.offset for each in ranges], [each.offset + each.nbytes for each in ranges]
    try:
        found = list(fs.cat_ranges(paths, starts, ends, on_error="return"))
    except Exception as error:
        found = [error] * len(ranges)
    traffic.add(len(ranges), sum(len(each) for each in found if isinstance(each, bytes)))
    return found


def _described(entry: Any) -> _Stored:
    size = entry.get("size")
    if type(size) is not int or size < 0:
        raise RunUnreadable(f"{entry.get('name')} has no known size: the server does not report it.")
    version = entry.get("ETag") or entry.get("etag") or entry.get("LastModified") or entry.get("last_commit")
    return _Stored(size, str(version or entry.get("mtime") or entry.get("created") or ""))

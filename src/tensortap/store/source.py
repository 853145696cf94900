"""The bytes of kept tensors: spans of safetensors files, mapped or read."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.file_io import BINARY, read_at
from tensortap.core.records import Location, Record
from tensortap.errors import RunUnreadable, UsageError
from tensortap.store.format import PARTIAL, SHARD_NAME, rank_name

__all__ = ["Spans", "as_array", "cut_off", "open_span_file"]

_MOST_MAPPED = 32


class Spans:
    """Finds the bytes of a record under the run's folder. Maps of the files used last are kept open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._maps: OrderedDict[Path, mmap.mmap] = OrderedDict()

    def view(self, record: Record) -> memoryview:
        """The bytes, read-only, without a copy."""
        file, span = self._where(record)
        if not span.nbytes:
            return memoryview(b"")
        mapped = self._maps.get(file)
        if mapped is None or len(mapped) < span.offset + span.nbytes:  # it may have grown since
            mapped = self._maps[file] = self._map(file, span)
        self._maps.move_to_end(file)
        if len(self._maps) > _MOST_MAPPED:
            self._maps.popitem(last=False)  # arrays over it keep it alive for themselves
        return memoryview(mapped)[span.offset : span.offset + span.nbytes]

    def read(self, record: Record) -> memoryview:
        """The bytes, copied: for a pass over a whole run with no more than one tensor in memory."""
        file, span = self._where(record)
        data = bytearray(span.nbytes)
        fd = open_span_file(file)
        try:
            at = 0
            while at < span.nbytes:
                count = read_at(fd, memoryview(data)[at:], span.offset + at)
                if not count:
                    raise cut_off(file, span)
                at += count
        except OSError as error:
            raise RunUnreadable(f"{file} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)
        return memoryview(data).toreadonly()

    def path_of(self, rank: int, name: str) -> Path:
        """The file of a span. The index may come from anywhere: it must not name files elsewhere."""
        if not SHARD_NAME.fullmatch(name):
            raise RunUnreadable(f"{self._path}: the index of rank {rank} is damaged; it names a file {name!r}.")
        return self._path / rank_name(rank) / name

    def close(self) -> None:
        self._maps.clear()

    def _where(self, record: Record) -> tuple[Path, Location]:
        span = record.location
        if span is None:
            raise UsageError(
                f"{record.key} (rank {record.rank}): only the summary was kept. "
                'Capture with keep="tensors" to have the values.'
            )
        expected = prod(record.shape) * dtypes.numpy_dtype(record.dtype).itemsize
        if span.offset < 0 or span.nbytes != expected:
            raise RunUnreadable(f"{record.key} (rank {record.rank}): the index is damaged; it says {span}.")
        return self.path_of(record.rank, span.file), span

    def _map(self, file: Path, span: Location) -> mmap.mmap:
        fd = open_span_file(file)
        try:
            if os.fstat(fd).st_size < span.offset + span.nbytes:
                raise cut_off(file, span)
            return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise RunUnreadable(f"{file} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)


def as_array(view: memoryview, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Bytes as a read-only array; copied only where elements do not lie as the processor wants them."""
    kind = dtypes.numpy_dtype(dtype)
    if not view.nbytes:
        array = np.empty(shape, kind)
    else:
        array = np.frombuffer(view, np.uint8).view(kind).reshape(shape)
        if not array.flags.aligned:
            array = array.copy()
    array.flags.writeable = False
    return array


def open_span_file(file: Path) -> int:
    # The last one again: it may be finished, and so renamed, between the first look and the second.
    for path in (file, file.with_name(file.name + PARTIAL), file):
        if path.exists():
            with suppress(FileNotFoundError):
                return _opened(path)
    raise RunUnreadable(f"{file} is missing: the tensors in it cannot be loaded; their summaries still can.")


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | BINARY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunUnreadable(f"{path} cannot be read: {error.strerror}") from error


def cut_off(file: Path, span: Location) -> RunUnreadable:
    return RunUnreadable(
        f"{file} is cut off: bytes {span.offset} to {span.offset + span.nbytes} are not there. Was it copied whole?"
    )

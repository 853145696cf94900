"""The arrays of an .npz archive: mapped if they are stored uncompressed, else decompressed on demand."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tensortap.core.records import Location
from tensortap.errors import RunUnreadable
from tensortap.store.formats.entries import Array, LoadedTensor, check_expansion
from tensortap.store.formats.npy.header import LONGEST_HEADER, NpyHeader, array_from, read_header
from tensortap.store.formats.pickles.refusal import holds_pickle
from tensortap.store.source import SingleFile, read_head

__all__ = ["NpzArchive", "recognizes"]

_SUFFIX, _MEMBER = ".npz", ".npy"
_LOCAL = struct.Struct("<4s22xHH")
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
)


def recognizes(path: Path) -> bool:
    """Return whether a file is an archive of arrays, by its ending or, if it has another one, by its content."""
    if path.suffix == _SUFFIX:
        return not path.is_dir() and not holds_pickle(path)  # whose error names what it would load
    if read_head(path, 2) != b"PK":
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except _BROKEN:
        return False
    return bool(names) and all(name.endswith(_MEMBER) for name in names)


class NpzArchive:
    """Reads members by name, without their ending. Errors of a member are RunUnreadable with the reason alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.files = SingleFile(path)
            self._size = self.files.size("")
            self._zip = zipfile.ZipFile(self.files.stream(""))
        except _BROKEN as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise RunUnreadable(f"{path} cannot be read as an .npz archive: {reason}.") from error
        self.others = [each.filename for each in self._zip.infolist() if not each.filename.endswith(_MEMBER)]
        """Members that are not arrays."""
        members = [each for each in self._zip.infolist() if each.filename.endswith(_MEMBER)]
        self._members = {each.filename.removesuffix(_MEMBER): each for each in members}
        if len(self._members) < len(members):
            raise RunUnreadable(f"{path} is damaged: several of its arrays have the same name.")

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @cached_property
    def about(self) -> dict[str, Any]:
        """The facts that tensortap wrote into the archive's comment; empty if it did not write the archive."""
        try:
            value = json.loads(self._zip.comment)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def text(self, name: str) -> str:
        """Return a member that is a text, as NumPy saves one."""
        array = self.load(name).array
        return str(array) if array.dtype.kind == "U" and array.ndim == 0 else ""

    def header(self, name: str) -> NpyHeader:
        """Return the header of a member."""
        with self._reading(name) as member:
            if member.compress_type == zipfile.ZIP_STORED:
                view = self._stored(member)[1]
                return read_header(io.BytesIO(view[:LONGEST_HEADER]), len(view))
            with self._opened(member) as stream:
                return read_header(stream, member.file_size)

    def load(self, name: str) -> LoadedTensor:
        """Return the array of a member, in the dtype and byte order that it has there."""
        with self._reading(name) as member:
            if member.compress_type != zipfile.ZIP_STORED:
                return LoadedTensor(self._decompressed(member))
            begin, view = self._stored(member)
            header = read_header(io.BytesIO(view[:LONGEST_HEADER]), len(view))
            if zlib.crc32(view) != member.CRC:
                raise RunUnreadable("its bytes do not match the checksum in the archive: it is damaged")
            span = Location("", begin + header.offset, header.nbytes) if header.is_plain else None
            return LoadedTensor(array_from(view[header.offset :], header), span)

    @contextmanager
    def _reading(self, name: str) -> Iterator[zipfile.ZipInfo]:
        """Yield a member. Turn every error of reading it into RunUnreadable."""
        if name not in self._members:
            raise RunUnreadable("the archive has no such array")
        try:
            if self._members[name].flag_bits & 1:
                raise ValueError("it is encrypted")
            yield self._members[name]
        except RunUnreadable:
            raise
        except MemoryError as error:
            raise RunUnreadable("it needs more memory than there is") from error
        except _BROKEN as error:
            raise RunUnreadable(" ".join(str(error).split()) or type(error).__name__) from error

    def _stored(self, member: zipfile.ZipInfo) -> tuple[int, memoryview]:
        """Return the offset in the file and the size of a member that is stored uncompressed."""
        begin = self._begin(member)
        if begin + member.file_size > self._size or member.compress_size != member.file_size:
            raise ValueError("the archive is cut off, or its directory is damaged")
        return begin, self.files.view("", begin, member.file_size)

    def _begin(self, member: zipfile.ZipInfo) -> int:
        """Return the offset of a member's bytes: after its local header, which has a variable length."""
        if not 0 <= member.header_offset <= self._size - _LOCAL.size:
            raise ValueError("the archive is cut off, or its directory is damaged")
        mark, name, extra = _LOCAL.unpack(self.files.read("", member.header_offset, _LOCAL.size))
        if mark != b"PK\x03\x04":
            raise ValueError("the archive's directory is damaged")
        return member.header_offset + _LOCAL.size + int(name) + int(extra)

    def _opened(self, member: zipfile.ZipInfo) -> Any:
        if member.compress_type != zipfile.ZIP_DEFLATED:
            raise ValueError("it is compressed in a way that NumPy does not write")
        check_expansion(member.file_size, min(member.compress_size, self._size))
        return self._zip.open(member)

    def _decompressed(self, member: zipfile.ZipInfo) -> Array:
        with self._opened(member) as stream:
            header = read_header(stream, member.file_size)
            data: Array = np.empty(header.nbytes, np.uint8)
            view = data.data
            while view:
                count = stream.readinto(view)
                if not count:
                    raise EOFError("it is cut off")
                view = view[count:]
            while stream.read(LONGEST_HEADER):  # to the end, so that the checksum is compared
                pass
        return array_from(data.data, header)

"""The header of a safetensors file, collected while the tensors behind it are already being written.

    8 bytes   length of the rest, little-endian
    JSON      {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}, padded with spaces
    data      without holes; offsets count from here

The room for it is reserved at the start of the file, so that the data can be streamed behind it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from tensortap.core import dtypes
from tensortap.store.format import utf8
from tensortap.store.writer.route import BLOCK

__all__ = ["Header", "HeaderEntry", "room_for", "rounded"]

ALIGN = BLOCK  # so that whole slabs may go past the page cache
_LONGEST_NAME = 400


def rounded(nbytes: int) -> int:
    """Round up to the alignment of the data."""
    return -(-nbytes // ALIGN) * ALIGN


class HeaderEntry(NamedTuple):
    """The text of a tensor in the header, and its name there."""

    name: str
    text: bytes


class Header:
    """Entries of one file, in a region of `region` bytes."""

    def __init__(self, region: int) -> None:
        self.region = rounded(region)
        self._entries: list[bytes] = []
        self._names: set[str] = {"__metadata__"}  # has a meaning of its own in the format
        self._repeats: dict[str, int] = {}
        self.used = 8 + len(b"{}")

    def __len__(self) -> int:
        return len(self._entries)

    def plan(self, name: str, dtype: str, shape: Sequence[int], begin: int, end: int) -> HeaderEntry | None:
        """Return the entry of a tensor, or None if the region has no room for it."""
        unique = self._unique(_short(utf8(name)))
        text = _text(unique, dtype, shape, begin, end)
        return HeaderEntry(unique, text) if self.used + len(text) <= self.region else None

    def add(self, entry: HeaderEntry) -> None:
        """Add an entry, once its bytes are submitted."""
        self._entries.append(entry.text)
        self._names.add(entry.name)
        self.used += len(entry.text) + len(b",")

    def pack(self) -> bytes:
        """Return the whole region as it is in the file."""
        text = b"{" + b",".join(self._entries) + b"}"
        length = self.region - 8
        return length.to_bytes(8, "little") + text.ljust(length)

    def _unique(self, name: str) -> str:
        unique = name
        while unique in self._names:
            self._repeats[name] = self._repeats.get(name, 1) + 1
            unique = f"{name} #{self._repeats[name]}"
        return unique


def room_for(name: str, dtype: str, shape: Sequence[int], nbytes: int) -> int:
    """Return the size of a region that holds a file's first entry."""
    return 64 + len(_text(_short(utf8(name)), dtype, shape, 0, nbytes))


def _text(name: str, dtype: str, shape: Sequence[int], begin: int, end: int) -> bytes:
    sizes = [*shape, 2] if dtype == "complex128" else list(shape)  # no tag of its own: pairs of F64
    quoted = json.dumps(name, ensure_ascii=False)
    listed = ",".join(map(str, sizes))
    tag = dtypes.safetensors_tag(dtype)
    # The rest needs no quoting, and this is done for every tensor.
    return f'{quoted}:{{"dtype":"{tag}","shape":[{listed}],"data_offsets":[{begin},{end}]}}'.encode()


def _short(name: str) -> str:
    """Remove the middle of a very long name. The index has it in full, and the header is read as a whole."""
    if len(name) <= _LONGEST_NAME:
        return name
    half = _LONGEST_NAME // 2
    return f"{name[:half]}…{name[-half:]}"

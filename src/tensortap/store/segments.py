"""Reads files that grew: one object, or the segments that an object store has instead. See `store.format`."""

from __future__ import annotations

from typing import NamedTuple

from tensortap.store.format import SEGMENT_NAME
from tensortap.store.source import Bytes, Range

__all__ = ["Grown", "read_grown", "segments_of"]


class Grown(NamedTuple):
    """The content of a file that grew."""

    data: memoryview
    dropped: int = 0
    """Segments that are not part of the content, because one before them is missing or cut off."""
    is_one: bool = True
    """Whether the content is one object of that name."""


def read_grown(source: Bytes, name: str, begin: int = 0) -> Grown:
    """Return the content from an offset on. A single object is mapped where possible; segments are read together.

    Raise FileNotFoundError if there is neither.
    """
    try:
        size = source.size(name)
    except FileNotFoundError:
        segments = segments_of(source, name)
        if not segments:
            raise
        return _read_segments(source, name, segments, begin)
    return Grown(source.view(name, begin, size - begin) if size > begin else memoryview(b""))


def segments_of(source: Bytes, name: str) -> list[Range]:
    """Return the segments of a file in order: the name of each, its offset in the file, and its size."""
    folder, _, own = name.rpartition("/")
    found = []
    for each in source.names(folder):
        match = SEGMENT_NAME.match(each)  # one that is not finished has a longer name
        if match and match["name"] == own:
            stored = f"{folder}/{match[0]}" if folder else match[0]
            found.append(Range(stored, int(match["offset"]), source.size(stored)))
    return sorted(set(found), key=lambda each: each.offset)


def _read_segments(source: Bytes, name: str, segments: list[Range], begin: int) -> Grown:
    whole: list[Range] = []
    end = 0
    for segment in segments:
        if segment.offset != end:
            break
        whole.append(segment)
        end += segment.nbytes
    wanted = [each for each in whole if each.offset + each.nbytes > begin]
    source.prefetch([Range(each.name, 0, each.nbytes) for each in wanted])
    data = b"".join(source.read(each.name, 0, each.nbytes) for each in wanted)
    skipped = begin - wanted[0].offset if wanted and wanted[0].offset < begin else 0
    return Grown(memoryview(data)[skipped:].toreadonly(), len(segments) - len(whole), False)

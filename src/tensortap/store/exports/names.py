"""Names of modules as parts of paths: a model may use any name, a file system may not."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from tensortap.core.records import Key, Record, display_name
from tensortap.store.format import rank_name, utf8

__all__ = ["Unique", "encoded", "folder_of", "leaf_of", "pass_of", "title_of"]

_LONGEST = 160
_PLAIN = "()[],=+@~ "


def encoded(name: str) -> str:
    """Return a name as one part of a path: separators, controls and special characters are percent-encoded.

    >>> encoded("../x")
    '%2E.%2Fx'
    """
    part = quote(utf8(name), safe=_PLAIN)
    if part.startswith("."):  # neither a way up nor a hidden file
        part = "%2E" + part[1:]
    if len(part) > _LONGEST:  # file systems take 255 bytes; the manifest has the name in full
        mark = hashlib.sha256(part.encode()).hexdigest()[:12]
        part = f"{part[:_LONGEST].rstrip('%')}~{mark}"
    return part


def folder_of(record: Record) -> tuple[str, str, str]:
    """Return rank, step and module as folders."""
    return rank_name(record.rank), f"step_{record.key.step:06d}", encoded(display_name(record.key.module))


def leaf_of(key: Key) -> str:
    """Return the file of a tensor within its module and step, without its ending."""
    return encoded(f"{pass_of(key)}.call_{key.call}.{key.kind}.{key.path}")


def pass_of(key: Key) -> str:
    """Return the micro step as a part of a name; evaluation has numbers of its own."""
    return f"{'eval' if key.phase == 'eval' else 'micro'}_{key.micro}"


def title_of(key: Key) -> str:
    """Return the name of a tensor within its step, for formats that accept any. State has its name of a state dict."""
    if key.phase == "state":
        name = f"{key.module}.{key.path}" if key.module else key.path
        return utf8(f"{name}/after" if key.call else name)
    return utf8(f"{display_name(key.module)}/{key.kind}/{key.path}/{pass_of(key)}/call_{key.call}")


class Unique:
    """Makes names unique: a repeated one gets ~2 behind it."""

    def __init__(self, *taken: str) -> None:
        self._used = set(taken)

    def __call__(self, name: str) -> str:
        candidate, number = name, 1
        while candidate in self._used:
            number += 1
            candidate = f"{name}~{number}"
        self._used.add(candidate)
        return candidate

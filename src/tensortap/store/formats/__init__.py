"""Files that open as a run: one reader for each format, found through a registry.

A reader is a module with two functions:

    recognizes(path: Path) -> bool                               whether it reads the path; must be quick
    open_source(path: Path, summarize: Summarize) -> RunSource   see `tensortap.store.run.RunSource`

Readers are asked in order. `register_reader` adds one from outside the package.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tensortap.core.file_io import check_regular
from tensortap.core.records import Summary
from tensortap.core.urls import Url, as_place
from tensortap.errors import RunUnreadable

if TYPE_CHECKING:
    from tensortap.store.run import Run, RunSource

__all__ = ["Reader", "open_any", "register_reader", "unregister_reader"]

_OURS = (
    "tensortap.store.run_folder",  # first: a run needs none of the libraries of the others
    "tensortap.store.formats.npy.tree",
    "tensortap.store.formats.hdf5.file",
    "tensortap.store.formats.hdf5.folder",
    "tensortap.store.formats.npz.reader",
    "tensortap.store.formats.exported",
    "tensortap.store.formats.checkpoint",
)
_registered: list[Reader | str] = []


class Reader(Protocol):
    """Opens one format. A module with these functions is a reader."""

    def recognizes(self, path: Path, /) -> bool:
        """Return whether this reader opens the file or folder at the path."""

    def open_source(self, path: Path, summarize: Callable[[Any], Summary], /) -> RunSource:
        """Open it. `summarize` is for formats that have no summaries."""


def register_reader(reader: Reader | str) -> None:
    """Add a reader, which is asked before all others. A string is the name of a module, imported on first use.

    >>> register_reader("mypackage.my_format")                                 # doctest: +SKIP
    """
    _registered.insert(0, reader)


def unregister_reader(reader: Reader | str) -> None:
    """Remove a reader that was registered."""
    _registered.remove(reader)


def open_any(path: str | os.PathLike[str] | Url | Run, summarize: Callable[[Any], Summary]) -> Run:
    """Open a run, or another format at `path` that can be read as one. Return a run that is open already as it is.

    `summarize` is for formats that have no summaries.
    """
    from tensortap.store.run import Run, reading
    from tensortap.store.run_folder import open_run

    if isinstance(path, Run):
        return path
    where = as_place(path)
    if isinstance(where, Url):
        return _open_url(where, summarize)
    with reading(where):
        _check_kind(where)
        for each in (*_registered, *_OURS):
            reader: Any = import_module(each) if isinstance(each, str) else each
            if reader.recognizes(where):
                return Run(reader.open_source(where, summarize))
    return open_run(where)  # raises: it explains what the path is not


def _open_url(url: Url, summarize: Callable[[Any], Summary]) -> Run:
    """Open a run by ranges, anything else as a copy."""
    from tensortap.store.exports.manifest import MANIFEST
    from tensortap.store.format import RANK_NAME, RUN_JSON
    from tensortap.store.formats.copied import open_copy
    from tensortap.store.remote import RemoteFiles
    from tensortap.store.run import Run, reading
    from tensortap.store.run_folder import open_source

    with reading(url):
        files = RemoteFiles(url)
        names = files.names() if url.protocol not in ("http", "https") else []
        if RUN_JSON in names or (any(map(RANK_NAME.fullmatch, names)) and MANIFEST not in names):
            return Run(open_source(url, files=files))
        return open_copy(url, lambda local: open_any(local, summarize))


def _check_kind(path: Path) -> None:
    """Refuse FIFOs, sockets and devices before any reader opens them."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return  # the readers say what is missing
    except ValueError as error:
        raise RunUnreadable(f"{str(path)!r} is not a path: {error}.") from error
    if not stat.S_ISDIR(mode):
        check_regular(path, mode)

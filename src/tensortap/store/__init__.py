"""The store: a run on disk, written while it happens, read back lazily, legible without this library.

    source.py         Bytes: ranges of named objects; LocalFiles implements it, remote.py for URLs with range_cache.py
    segments.py       files that grew, in one piece or in segments; upload.py copies runs into an object store
    run.py            Run, and RunSource, the contract of a reader; over index.py (rows) and query.py (filters)
    format.py         the format on disk: version, columns, names; metadata.py checks its JSON files
    run_folder.py     reads a run on disk; folder.py decides which folder a writer may use
    memory.py         MemoryWriter and MemoryRun: the same contracts without files
    verification.py   checks bytes against digests
    writer/           RunWriter, over shard.py (tensors) and index.py (records)
    formats/          readers: other files that open as a run
    exports/          runs written in other formats

Importing this package is cheap: the first access to one of its names loads pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.store.run import Run
    from tensortap.store.run_folder import open_run
    from tensortap.store.writer.run_writer import RunWriter

__all__ = ["Run", "RunWriter", "open_run"]

_HOME = {"Run": "run", "open_run": "run_folder", "RunWriter": "writer.run_writer"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

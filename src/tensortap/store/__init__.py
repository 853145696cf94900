"""The store: a run on disk, written while it happens, read back lazily, legible without this library.

    format.py   the file format: version, columns, names
    folder.py   which folder a run may use, and which files there may be deleted
    run.py      Run, over index.py (the index), query.py (filters) and source.py (the bytes of tensors)
    memory.py   MemoryWriter and MemoryRun: the same contracts without files
    writer/     RunWriter, over shard.py (tensors) and index.py (records)
    formats/    other files that open as a run
    exports/    runs written in other formats

Importing this package costs nothing: pyarrow is loaded by the first name that is asked for.
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

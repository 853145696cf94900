"""The store: a run on disk, written while it happens, read back lazily, legible without this library.

    format.py   what is in the files: version, columns, names
    folder.py   which folder a run may use, and what may be deleted there
    writer.py   RunWriter: over shard.py (tensors; pieces.py, header.py, pool.py over arena.py, route.py) and index.py
                (records)
    reader.py   Run: over table.py (the index), select.py (filters), span.py (tensors' bytes)
    memory.py   MemoryWriter and MemoryRun: the same contracts without files
    rank_writer.py   what every writer promises to capture

Importing this package costs nothing: pyarrow is loaded by the first name that is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.store.reader import Run, open_run
    from tensortap.store.writer import RunWriter

__all__ = ["Run", "RunWriter", "open_run"]

_HOME = {"Run": "reader", "open_run": "reader", "RunWriter": "writer"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

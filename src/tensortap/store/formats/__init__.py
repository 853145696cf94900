"""What others write, opened as a run: checkpoints. Each format is a file; this one tells them apart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.records import Summary

if TYPE_CHECKING:
    from tensortap.store.reader import Run

__all__ = ["open_any"]


def open_any(path: str | os.PathLike[str], summarize: Callable[[Any], Summary]) -> Run:
    """Open a run, or whatever else lies at `path` and can be read as one. `summarize` is for what has no summaries."""
    from tensortap.store.formats.checkpoint import is_checkpoint, open_checkpoint
    from tensortap.store.reader import open_run

    if is_checkpoint(Path(path)):
        return open_checkpoint(Path(path), summarize)
    return open_run(path)

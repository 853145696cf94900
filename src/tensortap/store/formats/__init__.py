"""What others write, opened as a run: checkpoints. Each format is a file; this one tells them apart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.errors import RunUnreadable
from tensortap.records import Summary

if TYPE_CHECKING:
    from tensortap.store.reader import Run

__all__ = ["open_any"]


def open_any(path: str | os.PathLike[str], summarize: Callable[[Any], Summary]) -> Run:
    """Open a run, or whatever else lies at `path` and can be read as one. `summarize` is for what has no summaries."""
    from tensortap.store.formats.checkpoint import is_checkpoint, open_checkpoint
    from tensortap.store.reader import open_run

    try:
        checkpoint = is_checkpoint(Path(path))
    except OSError as error:
        raise RunUnreadable(f"{path} cannot be opened: {error.strerror}.") from error
    return open_checkpoint(Path(path), summarize) if checkpoint else open_run(path)

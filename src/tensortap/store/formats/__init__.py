"""What others write, opened as a run: checkpoints, trees of .npy files. One file a format; here they are told apart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.core.records import Summary
from tensortap.errors import RunUnreadable, TensortapError

if TYPE_CHECKING:
    from tensortap.store.run import Run

__all__ = ["open_any"]


def open_any(path: str | os.PathLike[str] | Run, summarize: Callable[[Any], Summary]) -> Run:
    """Open a run, or another format at `path` that can be read as one. Return a run that is open already as it is.

    `summarize` is for formats that have no summaries.
    """
    from tensortap.store.formats.checkpoint import is_checkpoint, open_checkpoint
    from tensortap.store.formats.exported import is_export, open_export
    from tensortap.store.formats.hdf5.file import is_hdf5, open_hdf5
    from tensortap.store.formats.hdf5.folder import is_hdf5_folder, open_hdf5_folder
    from tensortap.store.formats.npy.tree import is_npy_tree, open_npy_tree
    from tensortap.store.formats.npz.reader import is_npz, open_npz
    from tensortap.store.formats.pickles.refusal import holds_pickle
    from tensortap.store.run import Run, open_run

    if isinstance(path, Run):
        return path
    try:
        if is_npy_tree(Path(path)):
            return open_npy_tree(Path(path), summarize)
        if holds_pickle(Path(path)):  # before endings are believed: the error for a pickle names what it would load
            return open_checkpoint(Path(path), summarize)
        if is_hdf5(Path(path)):
            return open_hdf5(Path(path), summarize)
        if is_hdf5_folder(Path(path)):
            return open_hdf5_folder(Path(path), summarize)
        if is_npz(Path(path)):
            return open_npz(Path(path), summarize)
        if is_export(Path(path)):
            return open_export(Path(path), summarize)
        checkpoint = is_checkpoint(Path(path))
    except TensortapError:  # some of them are an OSError, too
        raise
    except OSError as error:
        raise RunUnreadable(f"{path} cannot be opened: {error.strerror}.") from error
    return open_checkpoint(Path(path), summarize) if checkpoint else open_run(path)

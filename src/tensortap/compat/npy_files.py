"""The sink of a saving hook: write tensors as .npy files, up to the requested limits."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.tree import Site
from tensortap.capture.selection import Keep
from tensortap.core import dtypes
from tensortap.core.records import Key, display_name
from tensortap.errors import StoreWriteError, UsageError
from tensortap.frameworks.base import Framework
from tensortap.store.exports.plain import write_npy
from tensortap.store.formats.npy.names import GRADS, TENSORS, files_in, grad_file, tensor_file
from tensortap.store.formats.npy.sidecar import SidecarEntry, SidecarWriter, copy_sidecar

__all__ = ["EVALUATION", "FileLimit", "NpyFiles"]

EVALUATION = "evaluation"
"""Folder of the files saved before training began; it is a separate tree."""

_log = logging.getLogger("tensortap")


@dataclass(slots=True, eq=False)
class FileLimit:
    """Counts files: returns the index of the next one until the limit is reached."""

    name: str
    limit: int
    each_step: int | None
    """A limit per micro step, which replaces that for the whole run."""
    count: int = 0
    step: int = 0
    reported: bool = False
    """Whether a message has said that files are left out."""

    def __post_init__(self) -> None:
        if self.each_step is not None:
            self.limit, self.name = self.each_step, f"{self.name}_per_step"
        if not isinstance(self.limit, int):
            raise UsageError(f"{self.name} takes an integer, not {self.limit!r}; a negative one saves all")

    @property
    def reached(self) -> bool:
        """Whether no further file will be written."""
        return self.limit == 0 or (self.each_step is None and 0 < self.limit <= self.count)

    def next(self, step: int) -> int | None:
        """Return the next index of a micro step, or None if the limit is reached."""
        if self.each_step is not None and step != self.step:
            self.step, self.count = step, 0
        if 0 <= self.limit <= self.count:
            return None
        self.count += 1
        return self.count - 1


class NpyFiles:
    """A sink that writes one file per tensor. `ignored` returns whether to skip outputs of the running forward."""

    def __init__(self, framework: Framework, path: Path, tensors: FileLimit, grads: FileLimit) -> None:
        self.where = str(path)
        self.ignored: Callable[[], bool] = lambda: False
        self.undo = ExitStack()
        """Closed with the sink."""
        self._framework = framework
        self._path = path
        self._limits = {TENSORS: tensors, GRADS: grads}
        self._written: list[Path] | None = []
        """Files that may have to be set aside; None once training has begun."""
        self._rank = framework.rank()
        self._sidecar: SidecarWriter | None = None
        self._closed = False
        self._make_folders()

    @property
    def full(self) -> bool:
        return all(limit.reached for limit in self._limits.values())

    def report_limits(self) -> None:
        """Say once of each limit of the whole run that it is reached: later tensors are left out."""
        for kind, limit in self._limits.items():
            if limit.limit and limit.reached and not limit.reported:
                limit.reported = True
                if not self._rank:  # all ranks have the same limits
                    _log.warning(
                        "tensortap: %s=%d is reached: later %s are not saved; a negative number saves all",
                        limit.name,
                        limit.limit,
                        kind,
                    )

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        kind = GRADS if key.kind == "param_grad" else TENSORS
        # With several forwards before a backward, a recomputation may repeat a call of an earlier micro step.
        if kind == TENSORS and (self._framework.recomputing() or self.ignored()):
            return
        index = self._limits[kind].next(key.step)
        if index is None:
            self.report_limits()
            return
        if kind == GRADS:
            name = grad_file(index, self._parameter_name(site, key), key.step)
        else:
            name = tensor_file(index, site.cls, self._layer_name(site), key.path, key.step)
        array = self._framework.host(tensor)
        entry = SidecarEntry(dtypes.name_of(array.dtype), site.name, key.path, site.cls)
        try:
            if self._sidecar is None:
                self._sidecar = self._open_sidecar()
            self._sidecar.add(f"{kind}/{name}", entry)
            self._save(self._folder(self._path, kind) / name, array)
        except StoreWriteError:
            raise
        except OSError as error:
            raise StoreWriteError(
                f"{kind}/rank_{self._rank}/{name} could not be written: {error.strerror or error}; earlier files are "
                "readable"
            ) from error

    def _open_sidecar(self) -> SidecarWriter:
        """Create the sidecar. Read the rank again: the process group may be newer than the registration."""
        if (rank := self._framework.rank()) != self._rank:
            self._rank = rank
            self._make_folders()
        return SidecarWriter(self._path, rank, self._framework.name, self._framework.world())

    def _make_folders(self) -> None:
        for folder in (self._folder(self._path, kind) for kind in (TENSORS, GRADS)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                old = len(files_in(folder))
            except OSError as error:
                raise StoreWriteError(f"{folder} cannot be created: {error.strerror}; give another path=") from error
            if old:
                _log.warning(
                    "tensortap: %s holds %d files of an earlier run; those of the same names are replaced, "
                    "the others stay",
                    folder,
                    old,
                )

    def keep_all(self) -> None:
        """Forget the saved files: none of them will be set aside."""
        self._written = None

    def set_aside(self) -> None:
        """Move all files saved so far to a separate tree, and count from 0 again."""
        if self._written:
            tree = self._path / EVALUATION
            _log.warning(
                "tensortap: training begins; the %d files that evaluation has saved are now in %s",
                len(self._written),
                tree,
            )
            copy_sidecar(self._path, tree, self._rank)
            for file in self._written:
                target = tree / file.relative_to(self._path)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
            self._written = []
        for limit in self._limits.values():
            limit.count = limit.step = 0

    def end_step(self, step: int, book: CoverageBook) -> None:
        pass  # every file is complete as soon as it exists

    def close(self, status: str, reason: str, book: CoverageBook) -> None:
        if self._closed:
            return
        self._closed = True
        self.undo.close()
        for row in book.rows():
            if "is not recorded" in row.reason:
                _log.warning("tensortap: %s: %s", display_name(row.module), row.reason)

    def _folder(self, tree: Path, kind: str) -> Path:
        return tree / kind / f"rank_{self._rank}"

    def _layer_name(self, site: Site) -> str:
        return self._framework.assigned_name(site.owner) or site.name

    def _parameter_name(self, site: Site, key: Key) -> str:
        parameter = dict(self._framework.parameters(site.owner)).get(key.path)
        structural = f"{site.name}.{key.path}" if site.name else key.path
        return (self._framework.assigned_name(parameter) if parameter is not None else "") or structural

    def _save(self, file: Path, array: npt.NDArray[Any]) -> None:
        """Write a file that gets its name when complete. bfloat16 and float8 are widened: plain NumPy lacks them."""
        partial = self._path / f".{secrets.token_hex(6)}.partial"  # older checkers read all files of a rank's folder
        try:
            with partial.open("xb") as opened:
                write_npy(opened, array)
            partial.replace(file)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        if self._written is not None:
            self._written.append(file)

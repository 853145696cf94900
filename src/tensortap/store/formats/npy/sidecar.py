"""The sidecar of an .npy tree: the dtype of each tensor, and its place in the model.

    PATH/tensortap/rank_0.jsonl

The first line of a registration describes the process, each other line one file:

    {"format": "tensortap-npy", "version": 1, "framework": "torch", "world": 1}
    {"file": "tensors/tensor_idx_0_….npy", "dtype": "bfloat16", "module": "fc1", "path": "0", "class": "Linear"}

The sidecar is outside of `tensors` and `grads`, because older checkers read every file there as a tensor. Lines are
appended, each in one write and before its file exists. A kill leaves a line without a file, or half a line; both are
ignored. Where several lines name one file, the last one counts.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tensortap.core import dtypes
from tensortap.core.file_io import BINARY
from tensortap.errors import RunUnreadable, StoreWriteError
from tensortap.store.source import LocalFiles

__all__ = ["SIDECARS", "Sidecar", "SidecarEntry", "SidecarWriter", "copy_sidecar", "read_sidecar", "sidecar_path"]

SIDECARS = "tensortap"
_FORMAT, _VERSION = "tensortap-npy", 1


class SidecarEntry(NamedTuple):
    """One file of the tree."""

    dtype: str
    module: str
    path: str
    """The place in the module's output, or the name of the parameter in its module."""
    cls: str


@dataclass(frozen=True)
class Sidecar:
    """The sidecar of one rank. Empty if the tree has none."""

    framework: str = ""
    world: int = 0
    entries: Mapping[str, SidecarEntry] = field(default_factory=dict)
    """By file, as in `tensors/tensor_idx_0_….npy`."""
    notice: str = ""
    """Why the sidecar is not used, if it is not."""


def sidecar_path(tree: Path, rank: int) -> Path:
    return tree / SIDECARS / f"rank_{rank}.jsonl"


class SidecarWriter:
    """Appends to the sidecar of one rank. It holds no open file between two lines.

    >>> writer = SidecarWriter(Path("tmp_tensors"), 0, framework="torch", world=1)                   # doctest: +SKIP
    >>> writer.add("tensors/tensor_idx_0_….npy", SidecarEntry("bfloat16", "fc1", "0", "Linear"))     # doctest: +SKIP
    """

    def __init__(self, tree: Path, rank: int, framework: str, world: int) -> None:
        self.path = sidecar_path(tree, rank)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if _is_torn(self.path):
                self._append("\n")
            self._add_line({"format": _FORMAT, "version": _VERSION, "framework": framework, "world": world})
        except OSError as error:
            raise StoreWriteError(f"{self.path} cannot be written: {error.strerror}") from error

    def add(self, file: str, entry: SidecarEntry) -> None:
        """Describe a file that is about to be written."""
        self._add_line(
            {"file": file, "dtype": entry.dtype, "module": entry.module, "path": entry.path, "class": entry.cls}
        )

    def _add_line(self, values: Mapping[str, Any]) -> None:
        self._append(json.dumps(values) + "\n")

    def _append(self, text: str) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | BINARY, 0o666)
        try:
            data = text.encode()
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def copy_sidecar(tree: Path, other: Path, rank: int) -> None:
    """Describe in another tree the files that move there."""
    target = sidecar_path(other, rank)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(sidecar_path(tree, rank), target)


def read_sidecar(tree: Path, rank: int) -> Sidecar:
    """Read the sidecar of a rank. Lines that are damaged or incomplete are left out."""
    path = sidecar_path(tree, rank)
    try:
        files, name = LocalFiles(tree), f"{SIDECARS}/{path.name}"
        data = bytes(files.read(name, 0, files.size(name)))
    except FileNotFoundError:
        return Sidecar()
    except RunUnreadable as error:
        return Sidecar(notice=f"{SIDECARS}/{path.name} cannot be read, so dtypes may be missing: {error}")
    lines = data.decode("utf-8", errors="replace").splitlines()
    header: Mapping[str, Any] = {}
    entries = {}
    for values in map(_parsed, lines):
        if values.get("format") == _FORMAT:
            header = values
            if not isinstance(version := values.get("version"), int) or version > _VERSION:
                return Sidecar(notice=f"{SIDECARS}/{path.name} is of a newer version, so it is not used")
        elif (entry := _entry(values)) is not None:
            entries[values["file"]] = entry
    framework, world = header.get("framework"), header.get("world")
    return Sidecar(
        framework=framework if isinstance(framework, str) else "",
        world=world if isinstance(world, int) and 0 <= world < 1 << 31 else 0,
        entries=entries,
    )


def _is_torn(path: Path) -> bool:
    """Return whether the last line has no end, because its writer was killed."""
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False


def _parsed(line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _entry(values: Mapping[str, Any]) -> SidecarEntry | None:
    names = ("file", "dtype", "module", "path", "class")
    found = [value for name in names if isinstance(value := values.get(name), str)]
    if len(found) < len(names) or found[1] not in dtypes.NAMES:
        return None
    return SidecarEntry(*found[1:])

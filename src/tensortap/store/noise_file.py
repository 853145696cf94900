"""Noise files: how much each record moves when only rounding changes.

An Arrow IPC file with one row for each record. Its schema metadata has the format's name and version, the number of
seeds and the model's class. Rows have no steps: the effect of rounding on a module does not depend on them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tensortap.core.urls import address_of, as_place, is_url
from tensortap.errors import RunExists, RunUnreadable, StoreWriteError, TensortapError, shorten
from tensortap.store.source import AddressedFiles, read_head

__all__ = ["Noise", "Spot", "is_noise", "read_noise", "write_noise"]

Spot = tuple[str, int, str, str]
"""Module, call, kind, path."""

_FORMAT, _VERSION = "tensortap-noise", 1
_SCHEMA = pa.schema(
    [
        pa.field(
            "module", pa.string(), False, {"about": "structural name of the module; the root is the empty string"}
        ),
        pa.field("call", pa.int64(), False, {"about": "counts calls of the module within the micro step"}),
        pa.field("kind", pa.string(), False, {"about": "input | output | grad_input | grad_output | ..."}),
        pa.field("path", pa.string(), False, {"about": "where in the arguments or outputs the tensor sits"}),
        pa.field("rel_l2", pa.float64(), False, {"about": "the greatest relative L2 error over all seeds"}),
        pa.field("row_rel_l2", pa.float64(), False, {"about": "the same of the row that was furthest off"}),
    ]
)
_MAGIC = b"ARROW1"


class Noise:
    """The noise of each record. A call that was not measured has the noise of the noisiest call of its module."""

    def __init__(self, spreads: Mapping[Spot, tuple[float, float]]) -> None:
        self._spreads = spreads
        self._of_module: dict[tuple[str, str, str], tuple[float, float]] = {}
        for (module, _, kind, path), spread in spreads.items():
            before = self._of_module.get((module, kind, path), (0.0, 0.0))
            self._of_module[module, kind, path] = max(before[0], spread[0]), max(before[1], spread[1])

    def __len__(self) -> int:
        return len(self._spreads)

    @property
    def modules(self) -> set[str]:
        return {module for module, *_ in self._spreads}

    def of(self, spot: Spot) -> tuple[float, float]:
        """Return the relative error, and that of the worst row; zeros for an unknown record."""
        module, _, kind, path = spot
        return self._spreads.get(spot) or self._of_module.get((module, kind, path), (0.0, 0.0))


def write_noise(
    path: Path, rows: Iterable[tuple[Spot, tuple[float, float]]], about: Mapping[str, str], overwrite: bool
) -> None:
    """Write the table to a temporary file, and rename it."""
    if path.exists() and not (overwrite and is_noise(path)):
        raise RunExists(f"{path} exists already: pass overwrite=True to replace a noise file, or choose another path.")
    columns = list(zip(*((*spot, *spread) for spot, spread in rows), strict=True)) or [()] * len(_SCHEMA)
    metadata = {"format": _FORMAT, "version": str(_VERSION), **about}
    table = pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)],
        schema=_SCHEMA.with_metadata(metadata),
    )
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        aside.replace(path)
    except OSError as error:
        raise StoreWriteError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        aside.unlink(missing_ok=True)


def is_noise(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is a noise file, and not a run."""
    if not is_url(path):
        return read_head(Path(path), len(_MAGIC)) == _MAGIC
    place = as_place(path)
    try:
        return bytes(AddressedFiles().read(address_of(place), 0, len(_MAGIC))) == _MAGIC
    except (OSError, RunUnreadable):
        return False


def read_noise(path: str | os.PathLike[str]) -> Noise:
    """Read a noise file. Raise RunUnreadable if it is damaged, of a newer format, or not a noise file."""
    files, name = AddressedFiles(), address_of(as_place(path))
    try:
        reader = pa.ipc.open_file(pa.py_buffer(files.read(name, 0, files.size(name))))
        _check_schema(reader.schema, path)
        columns = [column.to_pylist() for column in _checked(reader)]
    except TensortapError:
        raise
    except (OSError, MemoryError, ValueError, pa.ArrowException) as error:
        raise RunUnreadable(
            f"{path} cannot be read as a noise file: {shorten(str(error))}. It is damaged or was not copied whole: "
            "measure the noise again with tensortap.noise."
        ) from error
    return Noise({(m, c, k, p): (rel, row) for m, c, k, p, rel, row in zip(*columns, strict=True)})


def _check_schema(schema: Any, path: str | os.PathLike[str]) -> None:
    """Check format and version before any column is read: a newer format may have other columns."""
    metadata = schema.metadata or {}
    if metadata.get(b"format") != _FORMAT.encode():
        raise RunUnreadable(f"{path} is an Arrow file, but not a noise file that tensortap.noise wrote.")
    version = int(metadata.get(b"version", b"0"))
    if version > _VERSION:
        raise RunUnreadable(f"{path} is of a newer format: upgrade tensortap (pip install --upgrade tensortap).")
    if not schema.equals(_SCHEMA):
        raise ValueError("its columns are not those of a noise file")


def _checked(reader: Any) -> Iterable[Any]:
    """Return the columns. Check first that every offset in them lies within its buffer."""
    batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    for batch in batches:
        batch.validate(full=True)  # Arrow follows the offsets of a damaged file out of its memory
    table = pa.Table.from_batches(batches, reader.schema)
    if any(column.null_count for column in table.columns):
        raise ValueError("it lacks values")
    for name in ("rel_l2", "row_rel_l2"):
        if not pc.all(pc.greater_equal(table.column(name), 0.0), min_count=0).as_py():  # false for NaN
            raise ValueError(f"{name} has values that are not errors")
    return table.columns  # type: ignore[no-any-return]

"""The pairs of a comparison as Parquet: the table unchanged, with the verdict in the metadata of the file.

>>> table = pyarrow.parquet.read_table("pairs.parquet")
>>> table.schema.metadata[b"tensortap.sentence"]
"""

from __future__ import annotations

from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import parquet

from tensortap.core.records import Comparison

__all__ = ["write"]

_SAID = ("reference", "candidate", "verdict", "sentence", "policy")


def write(comparison: Comparison, file: BinaryIO) -> None:
    said = {f"tensortap.{name}": str(getattr(comparison, name)).encode("utf-8", "backslashreplace") for name in _SAID}
    parquet.write_table(_with_strings(comparison.table).replace_schema_metadata(said), file, compression="zstd")


def _with_strings(table: Any) -> Any:
    """Return the table with coded words as strings: Parquet codes them itself."""
    fields = [field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field for field in table.schema]
    return table.cast(pa.schema(fields))

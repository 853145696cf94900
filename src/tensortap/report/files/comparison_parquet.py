"""The pairs of a comparison as Parquet: the table unchanged, with the verdict in the metadata of the file.

>>> table = pyarrow.parquet.read_table("pairs.parquet")
>>> table.schema.metadata[b"tensortap.sentence"]
"""

from __future__ import annotations

from typing import BinaryIO

from pyarrow import parquet

from tensortap.core.records import Comparison

__all__ = ["write"]

_SAID = ("reference", "candidate", "verdict", "sentence", "policy")


def write(comparison: Comparison, file: BinaryIO) -> None:
    said = {f"tensortap.{name}": str(getattr(comparison, name)).encode("utf-8", "backslashreplace") for name in _SAID}
    parquet.write_table(comparison.table.replace_schema_metadata(said), file, compression="zstd")

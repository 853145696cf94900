"""The pairs of a comparison as CSV: a header, one row a pair in execution order, all columns of the table.

Text is in quotes, a number that is not known is empty, NaN and infinities are nan, inf and -inf. A list is one cell
with semicolons: the index 3;17, the shape 8;256;512.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from tensortap.core.records import Comparison

__all__ = ["write"]

_CHUNK = 16_384


def write(comparison: Comparison, file: BinaryIO) -> None:
    schema = pa.schema([pa.field(f.name, pa.string() if _is_list(f.type) else f.type) for f in comparison.table.schema])
    with csv.CSVWriter(file, schema) as writer:
        for batch in comparison.table.to_batches(max_chunksize=_CHUNK):
            columns = [_joined(column) if _is_list(column.type) else column for column in batch.columns]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _joined(column: Any) -> Any:
    return pc.binary_join(pc.cast(column, pa.list_(pa.string())), ";")


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))

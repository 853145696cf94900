"""The pairs of a comparison as CSV: a header, then one row for each pair in execution order, with the table's columns.

Text is quoted. An unknown number is empty; NaN and infinities are nan, inf and -inf. A list is one cell with
semicolons: the index 3;17, the shape 8;256;512. Text that a spreadsheet might run as a formula begins with a ':
`core.csv_cells` says which.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from tensortap.core.csv_cells import GUARDED
from tensortap.core.records import Comparison

__all__ = ["write"]

_CHUNK = 16_384


def write(comparison: Comparison, file: BinaryIO) -> None:
    schema = pa.schema([pa.field(f.name, pa.string() if _is_text(f.type) else f.type) for f in comparison.table.schema])
    with csv.CSVWriter(file, schema) as writer:
        for batch in comparison.table.to_batches(max_chunksize=_CHUNK):
            writer.write_batch(pa.record_batch([_cells(column) for column in batch.columns], schema=schema))


def _cells(column: Any) -> Any:
    if _is_list(column.type):
        return pc.binary_join(pc.cast(column, pa.list_(pa.string())), ";")
    if not _is_text(column.type):
        return column
    column = column.cast(pa.string())
    unsafe = pc.match_substring_regex(column, GUARDED)
    return pc.if_else(unsafe, pc.binary_join_element_wise("'", column, ""), column)


def _is_text(kind: Any) -> bool:
    """Whether a column is written as text: strings, coded or not, and lists."""
    return bool(_is_list(kind) or pa.types.is_string(kind) or pa.types.is_dictionary(kind))


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))

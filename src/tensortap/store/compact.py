"""Columns of an index in little memory: repeated strings are coded, and columns without a value share one buffer.

Values and column types stay the same, except for strings: these become dictionaries with codes of the smallest width
that suffices. `plain` turns them back. A column of strings with nulls stays as it is: `to_numpy` of a dictionary
returns a word for a null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["coded_batch", "compact", "is_text", "joined", "plain"]

_WIDTHS = (np.int8, np.int16, np.int32)


def is_text(kind: Any) -> bool:
    """Whether a column is of strings, coded or not."""
    return bool(pa.types.is_string(kind.value_type if pa.types.is_dictionary(kind) else kind))


def coded_batch(batch: Any) -> Any:
    """Return an Arrow batch with its strings coded. The batch's own strings can be released."""
    columns = [column.dictionary_encode() if is_text(column.type) else column for column in batch.columns]
    fields = [field.with_type(column.type) for field, column in zip(batch.schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, metadata=batch.schema.metadata))


def compact(table: Any) -> Any:
    """Return the rows of a table in unbroken columns that take little memory."""
    count = table.num_rows
    zeros = pa.py_buffer(np.zeros(count + 1, np.int64))  # untouched pages of zeros take no memory
    columns = [_compact(table.column(field.name), count, zeros) for field in table.schema]
    fields = [field.with_type(column.type) for field, column in zip(table.schema, columns, strict=True)]
    return pa.table(columns, schema=pa.schema(fields, metadata=table.schema.metadata))


def joined(tables: Sequence[Any]) -> Any:
    """Return the rows of several compact tables as one."""
    if len(tables) == 1:
        return tables[0]
    names = tables[0].column_names
    columns = {name: pa.chunked_array(_alike([table.column(name) for table in tables])) for name in names}
    return compact(pa.table(columns, metadata=tables[0].schema.metadata))


def plain(table: Any) -> Any:
    """Return a table with its coded strings as strings."""
    for at, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(at, field.with_type(pa.string()), table.column(at).cast(pa.string()))
    return table


def _compact(column: Any, count: int, zeros: Any) -> Any:
    kind = column.type
    if is_text(kind) and not column.null_count:
        return _coded(column)
    if is_text(kind):
        column, kind = column.cast(pa.string()), pa.string()
    if column.null_count == count and count and not pa.types.is_nested(kind):
        return pa.Array.from_buffers(kind, count, [zeros] * (3 if is_text(kind) else 2), count)
    if kind == pa.int64() and not column.null_count and _is_zero(column):
        return pa.Array.from_buffers(kind, count, [None, zeros], 0)
    return _unbroken(column)


def _is_zero(column: Any) -> bool:
    bounds = pc.min_max(column).as_py()
    return bool(bounds["min"] == bounds["max"] == 0)


def _unbroken(column: Any) -> Any:
    """Return a column in one piece, which is a copy: a batch may lie in a mapped file, and results outlive that."""
    chunks = column.chunks
    if not chunks:
        return pa.array([], column.type)
    return pa.concat_arrays(chunks if len(chunks) > 1 else [*chunks, chunks[0].slice(0, 0)])


def _coded(column: Any) -> Any:
    """Return a column of strings, of which none is null, with words in the order in which they first occur."""
    words: dict[str, int] = {}
    parts = []
    for chunk in column.chunks:
        coded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        known = np.array([words.setdefault(word, len(words)) for word in coded.dictionary.to_pylist()], np.int32)
        parts.append(known[coded.indices.to_numpy()])
    width = next(each for each in _WIDTHS if len(words) <= np.iinfo(each).max)
    codes = np.concatenate(parts).astype(width) if parts else np.empty(0, width)
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(list(words), pa.string()))


def _alike(columns: Sequence[Any]) -> list[Any]:
    """Return the chunks of columns of one kind, with strings in codes of one width."""
    chunks = [chunk for column in columns for chunk in column.chunks]
    if not is_text(columns[0].type):
        return chunks
    kind = pa.string() if any(chunk.null_count for chunk in chunks) else pa.dictionary(pa.int32(), pa.string())
    return [chunk.cast(kind) for chunk in chunks]

"""The format of a run on disk.

    runs/a/run.json                       format, version, world, started, and facts about the run
    runs/a/rank_0/rank.json               status (running | finished | failed), reason, times, recording, pid, counts;
                                          in a run of several processes also mesh (names, sizes, coordinates) and
                                          renames
    runs/a/rank_0/coverage.json           what was seen of each module, and notices
    runs/a/rank_0/progress.json           for `tensortap watch`: step, recorded steps, seconds, cost in seconds
    runs/a/rank_0/calls.jsonl             plain arguments, a line for each call that got others than the one before:
                                          step, micro, module, call, arguments (see `tensortap.core.arguments`)
    runs/a/rank_0/loop.jsonl              loop facts, a line for each that changed: step, fact, of, value (see
                                          `tensortap.store.loop`)
    runs/a/rank_0/placements.jsonl        a line for each distinct placement, in the order of their numbers:
                                          shape, boxes, axes, source, order (see `tensortap.core.placement`)
    runs/a/rank_0/index.arrows            Arrow IPC stream, one row a record, SCHEMA below
    runs/a/rank_0/step_000000.0.safetensors   tensors; `.partial` at the end of the name while it is written
    runs/a/rank_0/ring_000000.0.safetensors   tensors of a ring: a row whose ring file is gone has no tensor any more

The index is only appended to, a whole batch at a time, after the bytes that the batch refers to. So any prefix of it is
valid. `file` is always the finished name; until the file is finished, the same bytes are at the same offset under the
`.partial` name. A call's line in calls.jsonl is written before any row of the call, a loop fact before every later row,
and a placement before any row that names it. A run without calls.jsonl or loop.jsonl was written by a version that did
not keep plain arguments or loop facts. A run without placements.jsonl has no placements.

A ring drops old steps: the index is replaced by one without their batches. The new index has two numbers in its
metadata: `dropped_steps`, the count of recorded steps that it no longer has, and `dropped_last`, the last of them. Then
lines that hold in no remaining step are removed.

An object store cannot append. There, each file that grows (the index and the .jsonl files) is a sequence of segments:

    s3://bucket/runs/a/rank_0/index.arrows.0000000000000000
    s3://bucket/runs/a/rank_0/index.arrows.0000000000065536

The number is the offset of the segment's first byte, so the segments in order are the file. A gap shows a missing or
shortened segment; the segments after it are not read. A segment is uploaded after the tensors and lines that its rows
refer to. rank.json is uploaded twice: first with the status "running", and last of all with the final one.

run.json, rank.json and the index (in its schema's metadata) each have a version: each rank is written by its own
process, and not necessarily by the same tensortap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.core import statistics
from tensortap.core.records import Key, Location, Record, Summary
from tensortap.core.sketches import FULL, fold

if TYPE_CHECKING:
    from tensortap.core.placement import Placement
    from tensortap.store.placements import PlacementTable

__all__ = [
    "CALLS",
    "COVERAGE_JSON",
    "END_OF_STREAM",
    "FORMAT",
    "INDEX",
    "LOOP",
    "OLDEST",
    "PARTIAL",
    "PLACEMENTS",
    "PROGRESS_JSON",
    "RANK_FORMAT",
    "RANK_JSON",
    "RANK_NAME",
    "RING_PREFIX",
    "RUN_FORMAT",
    "RUN_JSON",
    "SCHEMA",
    "SEGMENT_NAME",
    "SHARD_NAME",
    "TEMPORARY_NAME",
    "decode",
    "encode",
    "encode_columns",
    "index_schema",
    "rank_name",
    "segment_name",
    "shard_name",
    "unknown_columns",
    "utf8",
    "with_known_columns",
    "without_locations",
    "without_sketch",
]

FORMAT = 4
"""History of the format:
1: the first.
2: digest and sketch are defined anew (version 2 of `kernels.summary.reference`).
3: the batches of the index may be compressed, and sketches may be folded to fewer sums (`core.sketches`).
4: elements at the edge of the range are counted apart, in the column `edge` (version 3 of the summary). Rows may have
   a placement; a run whose index lacks that column has none.
"""
OLDEST = 4
"""Summaries of older runs cannot be compared with those of this version."""

RUN_FORMAT = "tensortap-run"
RANK_FORMAT = "tensortap-rank"
RUN_JSON = "run.json"
RANK_JSON = "rank.json"
COVERAGE_JSON = "coverage.json"
PROGRESS_JSON = "progress.json"
CALLS = "calls.jsonl"
LOOP = "loop.jsonl"
PLACEMENTS = "placements.jsonl"
INDEX = "index.arrows"
PARTIAL = ".partial"

SHARD_NAME = re.compile(r"(step|ring)_[0-9]{6,19}\.[0-9]{1,9}\.safetensors")
SEGMENT_NAME = re.compile(r"(?P<name>[a-z]+\.(arrows|jsonl))\.(?P<offset>[0-9]{16})")
RING_PREFIX = "ring_"
RANK_NAME = re.compile(r"rank_(0|[1-9][0-9]{0,8})")
TEMPORARY_NAME = re.compile(r"\.(run|rank|coverage|progress)\.json\.[0-9]+\.tmp")

# name, type, may be null, what it is. The last goes into the file as the field's metadata.
_COLUMNS: tuple[tuple[str, Any, bool, str], ...] = (
    ("step", pa.int64(), False, "counts the optimizer steps of the run"),
    (
        "micro",
        pa.int64(),
        False,
        "counts the root module's forwards within a step; those of an evaluation have a count of their own",
    ),
    (
        "phase",
        pa.string(),
        False,
        "forward | backward | state | eval: the forward of an evaluation between training steps",
    ),
    ("module", pa.string(), False, "structural name of the module; the root is the empty string"),
    ("call", pa.int64(), False, "counts calls of the module within the micro step"),
    ("kind", pa.string(), False, "input | output | grad_input | grad_output | param | param_grad | step_grad | buffer"),
    (
        "path",
        pa.string(),
        False,
        "where in the arguments or outputs the tensor sits, or the parameter's name",
    ),
    ("seq", pa.int64(), False, "execution order within the rank"),
    ("cls", pa.string(), False, "class name of the module"),
    ("dtype", pa.string(), False, "element type, by the name that torch uses"),
    ("shape", pa.list_(pa.int64()), False, "shape"),
    ("tensor", pa.int64(), False, "rows with the same number saw the very same tensor"),
    *((each.name, pa.type_for_alias(each.dtype), False, each.about) for each in statistics.STORED),
    # Not a fixed-size list: that would spend a kilobyte on every null.
    ("sketch", pa.list_(pa.float32()), True, "random projection; null if an earlier row has the same tensor"),
    ("file", pa.string(), True, "file next to the index that holds the bytes; null if they were not kept"),
    ("offset", pa.int64(), True, "where in the file the bytes begin, from the file's start"),
    ("nbytes", pa.int64(), True, "how many bytes"),
    ("placement", pa.int64(), True, "line of placements.jsonl, from 0; null if the position in a whole is not known"),
)

SCHEMA = pa.schema(
    [pa.field(name, kind, null, metadata={"about": about}) for name, kind, null, about in _COLUMNS],
    metadata={"format": "tensortap-index", "version": str(FORMAT)},
)
"""The columns of an index. Statistics that a process registered follow them, each in a column that may be null."""
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Closes an index that is complete. One that lacks it was cut off, or is still growing."""

_OPTIONAL = ("placement",)
"""The last columns of SCHEMA, which an index may lack."""
_KEY = Key._fields
_SCALARS = tuple(each.name for each in statistics.STORED)
_PLAIN = ("seq", "cls", "dtype", "shape", "tensor")


def shard_name(step: int, number: int, ring: bool = False) -> str:
    return f"{'ring' if ring else 'step'}_{step:06d}.{number}.safetensors"


def rank_name(rank: int) -> str:
    return f"rank_{rank}"


def segment_name(name: str, offset: int) -> str:
    return f"{name}.{offset:016d}"


def utf8(text: str) -> str:
    """Return the text, with lone surrogates, which UTF-8 cannot encode, as escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def index_schema() -> Any:
    """Return the columns of an index that is begun now: SCHEMA, and a column for each added statistic."""
    schema = SCHEMA
    for each in statistics.added():
        schema = schema.append(pa.field(each.name, pa.type_for_alias(each.dtype), metadata={"about": each.about}))
    return schema


def unknown_columns(schema: Any) -> list[str] | None:
    """Return the columns of an index that this process does not know; None if the schema is not that of an index.

    An index may have more columns than SCHEMA: statistics that the process that wrote it had registered.
    """
    required = [field for field in SCHEMA if field.name not in _OPTIONAL]
    found, more = list(schema)[: len(required)], list(schema)[len(required) :]
    if not pa.schema(found).equals(pa.schema(required)) or len({f.name for f in schema}) < len(schema):
        return None
    if not all(field.nullable and field.type in (pa.int64(), pa.float64()) for field in more):
        return None
    known = {name: SCHEMA.field(name).type for name in _OPTIONAL}
    known |= {each.name: pa.type_for_alias(each.dtype) for each in statistics.added()}
    return [field.name for field in more if known.get(field.name) != field.type]


def without_sketch() -> Any:
    """Return the columns of `index_schema` without the sketch, which most readers never need."""
    schema = index_schema()
    return schema.remove(schema.get_field_index("sketch"))


def with_known_columns(table: Any) -> Any:
    """Return rows with the columns of `without_sketch`: null where they lack one, without the unknown.

    Coded strings stay coded.
    """
    schema = without_sketch()
    if table.schema.equals(schema):
        return table
    columns = [
        table.column(field.name)
        if field.name in table.column_names and _holds(table.schema.field(field.name).type, field.type)
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    fields = [field.with_type(column.type) for field, column in zip(schema, columns, strict=True)]
    return pa.table(columns, schema=pa.schema(fields, metadata=schema.metadata))


def _holds(kind: Any, wanted: Any) -> bool:
    """Whether a column has the values of a type; strings may be coded."""
    return bool(kind == wanted or (pa.types.is_dictionary(kind) and kind.value_type == wanted))


def encode(
    records: Sequence[Record],
    first: Sequence[bool],
    schema: Any = None,
    buckets: int = FULL,
    placements: PlacementTable | None = None,
) -> Any:
    """Return records as one Arrow batch. `first` marks the rows that have their sketch: the first of each tensor.

    `placements` numbers the placements of the records; without it, these are left out.
    """
    schema = index_schema() if schema is None else schema
    columns: dict[str, Any] = {}
    for place, name in enumerate(_KEY):
        columns[name] = [record.key[place] for record in records]
    for name in _PLAIN:
        columns[name] = [getattr(record, name) for record in records]
    for name in _SCALARS:
        columns[name] = [getattr(record.summary, name) for record in records]
    locations = [record.location or (None, None, None) for record in records]
    columns["file"], columns["offset"], columns["nbytes"] = zip(*locations, strict=True)
    columns["sketch"] = [record.summary.sketch for record in records]
    columns["placement"] = [
        None if placements is None or each.placement is None else placements.number(each.placement) for each in records
    ]
    for name in schema.names[len(SCHEMA) :]:
        columns[name] = [record.summary.more.get(name) for record in records]
    return encode_columns(columns, first, schema, buckets)


def without_locations(batch: Any, keeps: Sequence[bool]) -> Any:
    """Return the batch with the locations of only those rows that `keeps` marks."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name in ("file", "offset", "nbytes"):
        kept = [value if keep else None for value, keep in zip(columns[name].to_pylist(), keeps, strict=True)]
        columns[name] = pa.array(kept, batch.schema.field(name).type)
    return pa.record_batch(list(columns.values()), schema=batch.schema)


def encode_columns(columns: Mapping[str, Any], first: Sequence[bool], schema: Any = None, buckets: int = FULL) -> Any:
    """Return columns as one Arrow batch. There is a sketch for each row; those of `first` rows are used.

    Sketches of more than `buckets` sums are folded to that many.

    An added statistic may be missing, as from a device whose kernel does not compute it; it is null then. So is the
    placement.
    """
    schema = index_schema() if schema is None else schema
    sketches = _sketches(columns["sketch"], first, buckets)
    columns = {"placement": pa.nulls(len(sketches), SCHEMA.field("placement").type), **columns, "sketch": sketches}
    arrays = [_column(columns[field.name], field.type) for field in SCHEMA]
    for field in list(schema)[len(SCHEMA) :]:
        given = columns.get(field.name)
        arrays.append(pa.nulls(len(sketches), field.type) if given is None else _column(given, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def decode(
    rows: Any, rank: int, sketches: Sequence[npt.NDArray[np.float32]], placements: Sequence[Placement] = ()
) -> list[Record]:
    """Return the records of an Arrow table. `sketches` has one for each row, also for repeated tensors.

    `placements` are those of the rank, by number; without them, records have none.
    """
    columns = {name: rows.column(name).to_pylist() for name in rows.column_names if name != "sketch"}
    keys = zip(*(columns[name] for name in _KEY), strict=True)
    scalars: Iterable[Any] = zip(*(columns[name] for name in _SCALARS), strict=True)
    added = [name for name in rows.column_names if name not in SCHEMA.names]
    more: Iterable[Any] = zip(*(columns[name] for name in added), strict=True) if added else repeat(())
    plain = zip(*(columns[name] for name in _PLAIN), strict=True)
    places = zip(columns["file"], columns["offset"], columns["nbytes"], strict=True)
    numbers = columns["placement"] if placements else repeat(None, rows.num_rows)
    return [
        Record(
            Key(*key),
            rank,
            seq,
            cls,
            dtype,
            tuple(shape),
            tensor,
            Summary(
                **dict(zip(_SCALARS, scalar, strict=True)), sketch=sketch, more=dict(zip(added, others, strict=True))
            ),
            None if place[0] is None else Location(*place),
            None if number is None else placements[number],
        )
        for (key, (seq, cls, dtype, shape, tensor), scalar, sketch, place, number), others in zip(
            zip(keys, plain, scalars, sketches, places, numbers, strict=True), more, strict=False
        )
    ]


def _column(values: Any, kind: Any) -> Any:
    if isinstance(values, pa.Array) and values.type == kind:
        return values
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([value and utf8(value) for value in values], kind)


def _sketches(sketches: Iterable[npt.NDArray[np.float32]], first: Sequence[bool], buckets: int) -> Any:
    chosen = np.asarray(first, bool)
    offsets = np.zeros(len(chosen) + 1, np.int32)
    if isinstance(sketches, np.ndarray):
        kept_rows = fold(sketches[chosen], min(buckets, sketches.shape[1]))
        offsets[1:][chosen] = kept_rows.shape[1]
        values = kept_rows.reshape(-1)
    else:
        kept = [*compress(sketches, first), _NO_SKETCH]
        if buckets < FULL:
            kept = [fold(each[None], min(buckets, each.size))[0] for each in kept]
        offsets[1:][chosen] = [sketch.size for sketch in kept[:-1]]
        values = np.concatenate(kept, dtype=np.float32, casting="same_kind")
    return pa.ListArray.from_arrays(
        pa.array(np.cumsum(offsets, dtype=np.int32)), pa.array(values), mask=pa.array(~chosen)
    )


_NO_SKETCH = np.empty(0, np.float32)

"""A run of whole tensors over a run of many ranks: one rank, with one record for each identity.

It implements the contract of a reader, so that alignment, judging and reports need not know that there were ranks.
Statistics and sketches are merged rank by rank. Bytes stay where they are: `assembly` says which ranges make up a
whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.compare.join.bands import Assembly, Piece, ranges, read_range
from tensortap.compare.join.beside import joined_calls, joined_coverage, joined_loop
from tensortap.compare.join.execution import execution_order
from tensortap.compare.join.layout import Layout, lay_out
from tensortap.compare.join.merging import merged_sketches, merged_statistics
from tensortap.compare.join.pieces import Ints, Pieces, read_pieces
from tensortap.core import dtypes
from tensortap.core.records import Coverage, Record
from tensortap.errors import RunUnreadable
from tensortap.store import Run
from tensortap.store.calls import Calls
from tensortap.store.format import index_schema
from tensortap.store.index import Index
from tensortap.store.loop import LoopFacts
from tensortap.store.run import RunSource
from tensortap.store.sketch_batches import ColumnSketches
from tensortap.store.source import AddressedFiles, Bytes

__all__ = ["JoinedSource", "joined_source"]

_JOINED = "joined"
"""File of a record whose bytes are in several places."""
_BETWEEN = "/"


class JoinedSource(RunSource):
    """The records of all ranks of a run, joined to whole tensors, as rank 0."""

    def __init__(self, run: Run, pieces: Pieces | None = None) -> None:
        """`pieces` are the rows of all ranks, if they were read already."""
        super().__init__(run.path, run.info, [0])
        self.run = run
        self.layout: Layout = lay_out(read_pieces(run) if pieces is None else pieces)
        self.on_disk = run.source.on_disk
        self.in_memory = run.source.in_memory
        self.without_positions: set[int] = set()
        """Groups whose digest and sketch were made without knowing the position in the whole."""
        self.guessed: set[int] = set()
        """Groups whose members are only guessed to be consecutive parts."""

    @property
    def is_recorded(self) -> bool:
        """Whether all ranks of the run have records."""
        return len(self.run.ranks) >= (self.run.info.get("world") or 1)

    def without_positions_of(self, rows: Ints) -> None:
        """Mark the groups of rows of `Pieces` whose digest and sketch belong to other positions."""
        group_of = np.empty(len(self.layout.order), np.int64)
        sizes = np.diff(self.layout.begin, append=len(self.layout.order))
        group_of[self.layout.order] = np.repeat(np.arange(len(self.layout)), sizes)
        self.without_positions |= set(group_of[rows].tolist())

    # --- rows --------------------------------------------------------------------------------------------------------
    @cached_property
    def groups(self) -> Ints:
        """The group of each row, in execution order. Groups of unknown layout have no row."""
        plans = self.layout.plans
        known = np.array([not plan.unknown and plan.covering.once and not plan.lacking for plan in plans], bool)
        order = execution_order(self.layout)
        return order[known[self.layout.plan[order]]] if len(order) else order

    @cached_property
    def row_of(self) -> dict[int, int]:
        """Rows by group."""
        return {group: row for row, group in enumerate(self.groups.tolist())}

    def changed(self) -> None:
        """Forget what follows from the layout, after it was changed."""
        for name in ("groups", "row_of", "pieced", "_tensors", "_numbers"):
            vars(self).pop(name, None)
        self._indexes.clear()

    @cached_property
    def _tensors(self) -> Ints:
        """A number for each row's tensor: the first row that has the same one."""
        pieces, first = self.layout.pieces, self.layout.first[self.groups]
        own = pieces.tensor[first] + (pieces.place[first] << 40)
        own = own * 2 + np.isin(self.groups, list(self.without_positions))
        _, at, number = np.unique(own, return_index=True, return_inverse=True)
        found: Ints = at[number.reshape(-1)] if len(own) else own
        return found

    @cached_property
    def pieced(self) -> npt.NDArray[np.bool_]:
        """Whether a row's bytes are in several places, or in another order than those of the whole."""
        layout = self.layout
        single = np.array([not plan.is_joined and plan.weight == 1.0 for plan in layout.plans], bool)
        first = layout.first[self.groups]
        placements, numbers = layout.pieces.placements, layout.pieces.placement[first]
        straight = np.array(
            [each.is_whole and not each.order and _is_in_order(each.boxes) for each in placements] + [True], bool
        )
        forms = [shape for _, shape in layout.pieces.forms]
        fits = [numbers[at] < 0 or forms[form] == placements[numbers[at]].shape for at, form in _forms(layout, first)]
        found = ~(single[layout.plan[self.groups]] & straight[numbers] & np.array(fits, bool))
        return np.asarray(found, bool)

    @cached_property
    def _numbers(self) -> dict[str, Any]:
        return merged_statistics(self.run, self.layout, self.groups)

    # --- the contract of a reader ------------------------------------------------------------------------------------
    def read_index(self, rank: int) -> Index:
        layout, pieces = self.layout, self.layout.pieces
        groups, count = self.groups, len(self.groups)
        first = layout.first[groups]
        spots = [pieces.spots[spot] for spot in pieces.spot[first].tolist()]
        numbers = dict(self._numbers)
        kept = np.ones(len(layout), bool)
        np.logical_and.at(kept, layout.group, pieces.kept[layout.chosen])
        kept = kept[groups]
        shapes = [layout.plans[plan].shape for plan in layout.plan[groups].tolist()]
        words = [pieces.forms[form][0] for form in pieces.form[first].tolist()]
        files, offsets = numbers.pop("file"), numbers.pop("offset")
        nbytes = [prod(shape) * dtypes.numpy_dtype(word).itemsize for shape, word in zip(shapes, words, strict=True)]
        rank_of = pieces.rank[first].tolist()
        for row in range(count):
            if not kept[row]:
                files[row] = None
            elif self.pieced[row]:
                files[row], offsets[row] = _JOINED, 0
            else:
                files[row] = f"{rank_of[row]}{_BETWEEN}{files[row]}"
        columns: dict[str, Any] = {
            "step": pieces.step[first],
            "micro": pieces.micro[first],
            "phase": [spot[0] for spot in spots],
            "module": [spot[1] for spot in spots],
            "kind": [spot[2] for spot in spots],
            "path": [spot[3] for spot in spots],
            "seq": np.arange(count),
            "dtype": words,
            "shape": shapes,
            "tensor": self._tensors,
            "file": files,
            "offset": [None if file is None else int(offset) for file, offset in zip(files, offsets, strict=True)],
            "nbytes": [None if file is None else size for file, size in zip(files, nbytes, strict=True)],
            **numbers,
        }
        schema = index_schema()
        arrays = [
            pa.nulls(count, each.type) if each.name not in columns else pa.array(columns[each.name], each.type)
            for each in schema
            if each.name != "sketch"
        ]
        fields = [each for each in schema if each.name != "sketch"]
        sketches = ColumnSketches(count, self._sketch_column)
        return Index(rank, pa.table(arrays, schema=pa.schema(fields)), sketches=sketches)

    def _sketch_column(self) -> Any:
        """Return the sketch of each row that is the first of its tensor; null where a piece has none."""
        matrix = merged_sketches(self.run, self.layout, self.groups, self._tensors == np.arange(len(self.groups)))
        with np.errstate(over="ignore", invalid="ignore"):
            sketches = matrix.astype(np.float32)
        having = ~np.isnan(matrix).all(axis=1) if matrix.size else np.zeros(len(self.groups), bool)
        offsets = np.concatenate([[0], np.cumsum(np.where(having, matrix.shape[1], 0))]).astype(np.int32)
        values = sketches[having].reshape(-1)
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.float32()), mask=pa.array(~having))
        return pa.chunked_array([column])

    def view(self, record: Record) -> memoryview:
        location = record.location
        if location is None:
            raise RunUnreadable(f"{record.key}: the tensors of some ranks were not kept.")
        if location.file != _JOINED:
            first = int(self.layout.first[self.groups[record.seq]])
            return self._member_bytes(first)
        array = read_range(self._files, self.assembly(record.seq), record.dtype, 0, prod(record.shape))
        return memoryview(array.view(np.uint8).data).toreadonly()

    @cached_property
    def _files(self) -> Bytes:
        return AddressedFiles() if self.on_disk else _MemberBytes(self)

    def prefetch(self, records: Iterable[Record]) -> None:
        records = [record for record in records if record.location is not None]
        wholes = [record for record in records if record.location is not None and record.location.file == _JOINED]
        self._files.prefetch(
            each for record in wholes for each in ranges(self.assembly(record.seq), record.dtype, 0, prod(record.shape))
        )
        members = [int(self.layout.first[self.groups[record.seq]]) for record in records if record not in wholes]
        pieces = self.layout.pieces
        self.run.source.prefetch(self.run.at(int(pieces.rank[each]), int(pieces.row[each])) for each in members)

    def _member_bytes(self, member: int) -> memoryview:
        """Return the bytes that one rank stored."""
        pieces = self.layout.pieces
        return self.run.source.view(self.run.at(int(pieces.rank[member]), int(pieces.row[member])))

    def address(self, rank: int, file: str) -> str:
        own, between, name = file.partition(_BETWEEN)
        return self.run.source.address(int(own), name) if between else file

    def assembly(self, row: int) -> Assembly:
        """Return the pieces that make up the whole of a row."""
        layout = self.layout
        group = int(self.groups[row])
        plan = layout.plan_of(group)
        spots = slice(*np.searchsorted(layout.group, (group, group + 1)))
        summands: dict[int, list[Piece]] = {}
        for chosen, term in zip(layout.chosen[spots].tolist(), layout.term[spots].tolist(), strict=True):
            summands.setdefault(term, []).append(self._piece(chosen, plan.flat))
        shape = (prod(plan.shape),) if plan.flat else plan.shape
        return Assembly(shape, tuple(tuple(each) for each in summands.values()), plan.weight)

    def _piece(self, chosen: int, flat: bool) -> Piece:
        pieces = self.layout.pieces
        rank, number = int(pieces.rank[chosen]), int(pieces.placement[chosen])
        shape = pieces.forms[int(pieces.form[chosen])][1]
        if self.on_disk:
            columns, at = self.run.columns(rank), int(pieces.row[chosen])
            name = self.run.source.address(rank, columns.column("file")[at].as_py())
            offset = columns.column("offset")[at].as_py()
        else:
            name, offset = str(chosen), 0
        if number < 0:
            return Piece(name, offset, shape, (tuple((0, 0, size) for size in shape),))
        placement = pieces.placements[number]
        local = (prod(shape),) if flat else shape
        return Piece(name, offset, local, placement.boxes, () if flat else placement.order)

    def finished(self) -> bool:
        return self.run.source.finished()

    def failure(self) -> str:
        return self.run.source.failure()

    def unreadable(self) -> list[str]:
        return self.run.source.unreadable()

    def notices(self) -> list[str]:
        return self.run.source.notices()

    def coverage(self) -> dict[int, list[Coverage]]:
        known = self.run.source.coverage()
        return {0: joined_coverage(known)} if known else {}

    def calls(self, rank: int) -> Calls | None:
        return joined_calls(self.run.source.calls(each) for each in self.run.ranks)

    def loop(self, rank: int) -> LoopFacts | None:
        if self._loop is None:
            self._loop = [joined_loop(self.run.source.loop(each) for each in self.run.ranks)]
        return self._loop[0]

    _loop: list[LoopFacts | None] | None = None

    def close(self) -> None:
        super().close()
        self.run.source.close()


class _MemberBytes(Bytes):
    """The bytes of members of a run in memory, by their numbers in `Pieces`."""

    def __init__(self, joined: JoinedSource) -> None:
        self._joined = joined

    def size(self, name: str) -> int:
        return self._joined._member_bytes(int(name)).nbytes

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        target[:] = self._joined._member_bytes(int(name))[offset : offset + len(target)]


def joined_source(run: Run) -> JoinedSource | None:
    """Return what joins the ranks of a run; None if it is a run as it was recorded."""
    return run.source if isinstance(run.source, JoinedSource) else None


def _forms(layout: Layout, first: Ints) -> list[tuple[int, int]]:
    return list(enumerate(layout.pieces.form[first].tolist()))


def _is_in_order(boxes: Any) -> bool:
    """Whether local positions are those of the whole."""
    return all(start == offset for box in boxes for start, offset, _ in box)

"""The rows of all ranks of a run as columns: identity, placement, and what a vote needs.

Ranks are read one after the other, and only a few numbers of each row are kept: the statistics and sketches of a
thousand ranks would not fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core.placement import Mesh, Placement
from tensortap.store import Run
from tensortap.store.index import Index
from tensortap.store.run import reading

__all__ = ["MICRO", "Ints", "Pieces", "indexes", "read_pieces"]

Ints = npt.NDArray[np.int64]
_SPOT = ("phase", "module", "kind", "path")
_COUNTED = ("step", "micro", "call")
MICRO = "micro"
"""The axis of micro batches."""


@dataclass(frozen=True)
class Pieces:
    """The rows of all ranks, in order of rank and execution."""

    ranks: tuple[int, ...]
    meshes: Mapping[int, Mesh]
    place: Ints
    """Position of the row's rank in `ranks`."""
    row: Ints
    """Row in the index of its rank."""
    identity: Ints
    """Equal for rows of one identity. Numbers follow no order."""
    spot: Ints
    spots: list[tuple[str, str, str, str]]
    """Phase, module, kind and path, by the column `spot`."""
    step: Ints
    micro: Ints
    call: Ints
    seq: Ints
    digest: npt.NDArray[np.uint64]
    tensor: Ints
    kept: npt.NDArray[np.bool_]
    form: Ints
    forms: list[tuple[str, tuple[int, ...]]]
    """Dtype and local shape, by the column `form`."""
    placement: Ints
    """Number in `placements`; -1 where it is unknown."""
    placements: list[Placement]
    member: Ints
    """Micro batch of each place, where micro batches are members of their own; else 0."""

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def rank(self) -> Ints:
        found: Ints = np.array(self.ranks, np.int64)[self.place]
        return found

    def identified(self) -> Pieces:
        """Return the same rows with their identities counted anew."""
        columns = {name: getattr(self, name) for name in ("step", "micro", "call", "spot", "place")}
        return replace(self, identity=_identities(columns))

    def coordinate_of(self, place: int, axis: str) -> int:
        """Return the position of a place along an axis; micro batches are one, too."""
        return int(self.member[place]) if axis == MICRO else self.coordinate(self.ranks[place], axis)

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of a rank along an axis; without a mesh, its number."""
        mesh = self.meshes.get(rank)
        return rank if mesh is None else mesh.coordinate(axis)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 0 if it is unknown."""
        if axis == MICRO:
            return 0  # steps differ
        return max((mesh.size(axis) for mesh in self.meshes.values() if axis in mesh.names), default=0)

    def axis_between(self, ranks: tuple[int, ...]) -> str:
        """Return the one mesh axis along which ranks differ; empty if there is none, or several."""
        known = [self.meshes[rank] for rank in ranks if rank in self.meshes]
        if len(known) < 2:
            return ""
        names = known[0].names
        differing = [name for name in names if len({mesh.coordinate(name) for mesh in known}) > 1]
        return differing[0] if len(differing) == 1 else ""


def indexes(run: Run, ranks: Sequence[int] | None = None) -> Iterator[tuple[int, Index]]:
    """Yield the index of each rank. Only the last one is kept: what a caller does not hold is freed."""
    last, found = None, None
    for rank in run.ranks if ranks is None else ranks:
        if found is None or rank != last:
            with reading(run.path):
                last, found = rank, run.source.read_index(rank)
        yield rank, found


class _Codes:
    """Numbers values in the order in which they come."""

    def __init__(self) -> None:
        self.found: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        return self.found.setdefault(value, len(self.found))


def read_pieces(run: Run) -> Pieces:
    """Read the rows of all ranks, without operators: ranks that share the work run other ones."""
    spots, forms, placements = _Codes(), _Codes(), _Codes()
    by_key: dict[Any, Placement] = {}
    columns: dict[str, list[npt.NDArray[Any]]] = {}

    def add(name: str, values: npt.NDArray[Any]) -> None:
        columns.setdefault(name, []).append(values[kept])

    for place, (_, index) in enumerate(indexes(run)):
        table, count = index.columns, len(index)
        codes, words = _words(table, "kind")
        kept = codes != words.index("operator") if "operator" in words else slice(None)
        add("place", np.full(count, place, np.int64))
        add("row", np.arange(count))
        for name in (*_COUNTED, "seq", "digest", "tensor"):
            add(name, table.column(name).to_numpy())
        add("kept", table.column("file").is_valid().to_numpy())
        add("spot", _coded([_words(table, name) for name in _SPOT], spots, count))
        add("form", _coded([_words(table, "dtype"), _shapes(table)], forms, count))
        numbers = np.full(len(index.placements) + 1, -1, np.int64)  # the last one: no placement
        for number, placement in enumerate(index.placements):
            axes = tuple(sorted(placement.axes.items()))
            key = (placement.shape, placement.boxes, axes, placement.order, placement.source)
            by_key.setdefault(key, placement)
            numbers[number] = placements.of(key)
        own = table.column("placement")
        add("placement", numbers[own.fill_null(-1).to_numpy()] if count else np.empty(0, np.int64))
    joined: dict[str, Any] = {name: np.concatenate(parts) for name, parts in columns.items()}
    meshes = {rank: mesh for rank in run.ranks if (mesh := run.mesh(rank)) is not None}
    identity = _identities(joined)
    return Pieces(
        ranks=tuple(run.ranks),
        meshes=meshes,
        identity=identity,
        spots=list(spots.found),
        forms=list(forms.found),
        placements=[by_key[key] for key in placements.found],
        member=np.zeros(len(run.ranks), np.int64),
        **joined,
    )


def _words(table: Any, name: str) -> tuple[Ints, list[Any]]:
    encoded = table.column(name).combine_chunks().dictionary_encode()
    if hasattr(encoded, "chunk"):
        encoded = encoded.chunk(0) if encoded.num_chunks else encoded
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _shapes(table: Any) -> tuple[Ints, list[Any]]:
    """Return a code for each row's shape, and the shapes."""
    column = table.column("shape").combine_chunks()
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    width = int(lengths.max(initial=0))
    padded = np.full((len(lengths), width + 1), -1, np.int64)
    padded[:, width] = lengths
    for at in range(width):
        having = np.flatnonzero(lengths > at)
        padded[having, at] = values[offsets[having] + at]
    unique, codes = np.unique(padded, axis=0, return_inverse=True)
    shapes = [tuple(each[: each[width]]) for each in unique.tolist()]
    return codes.reshape(-1).astype(np.int64), shapes


def _coded(columns: list[tuple[Ints, list[Any]]], known: _Codes, count: int) -> Ints:
    """Return a number for each row's combination of words, the same over all ranks."""
    whole = np.zeros(count, np.int64)
    for codes, words in columns:
        whole = whole * max(1, len(words)) + codes
    unique, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
    numbers = np.empty(len(unique), np.int64)
    for at, row in enumerate(first.tolist()):
        numbers[at] = known.of(tuple(words[codes[row]] for codes, words in columns))
    return numbers[inverse.reshape(-1)]


def _identities(columns: Mapping[str, Ints]) -> Ints:
    """Return a number for each row's identity. A repeated identity within a rank gets a number for each repetition."""
    whole = _dense([columns[name] for name in ("step", "micro", "call", "spot")])
    own = _dense([whole, columns["place"]])
    return _dense([whole, _occurrences(own)])


def _dense(columns: list[Ints]) -> Ints:
    found = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        low = column - column.min(initial=0)
        width = int(low.max(initial=0)) + 1
        if (int(found.max(initial=0)) + 1) * width >= 1 << 62:
            found = np.unique(found, return_inverse=True)[1].reshape(-1)
            low = np.unique(low, return_inverse=True)[1].reshape(-1)
            width = int(low.max(initial=0)) + 1
        found = found * width + low
    return np.unique(found, return_inverse=True)[1].reshape(-1)


def _occurrences(identity: Ints) -> Ints:
    order = np.argsort(identity, kind="stable")
    ordered = identity[order]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    found = np.empty(len(identity), np.int64)
    found[order] = np.arange(len(identity)) - np.repeat(first, np.diff(first, append=len(identity)))
    return found

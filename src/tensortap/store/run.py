"""Run: reads back what RunWriter wrote, lazily. Also a run that was killed, or is still being written."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from functools import cached_property
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.core.arguments import read
from tensortap.core.presentation import CoverageByRank, reports
from tensortap.core.records import STATE_KINDS, Coverage, Key, Record
from tensortap.errors import MissingDependency, RunNotFound, RunUnreadable
from tensortap.store.calls import Calls, read_calls
from tensortap.store.folder import read_json
from tensortap.store.format import (
    CALLS,
    COVERAGE_JSON,
    INDEX,
    RANK_JSON,
    RANK_NAME,
    RUN_JSON,
    check_run_info,
    check_version,
    coverage_from,
    rank_name,
)
from tensortap.store.index import Index
from tensortap.store.query import Filter
from tensortap.store.source import Spans, as_array

__all__ = ["Run", "open_run"]

_CHUNK = 1024
_SHOWN = 8
"""Values that a message lists before it only counts."""


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run's folder. Reads little: indexes are mapped when asked for, tensors when loaded.

    >>> run = open_run("runs/a")                                               # doctest: +SKIP
    >>> for record in run.records(module="layers.0.*", nonfinite=True):        # doctest: +SKIP
    ...     print(record.key, record.summary.nan)
    """
    folder = Path(path)
    try:
        if not folder.exists():
            raise RunNotFound(f"{folder} does not exist: no run to open.")
        if not folder.is_dir():
            raise RunUnreadable(
                f"{folder} is a file of no known format. Open the folder of a run, an .npz or .hdf5 file, or a "
                "checkpoint (.safetensors, or a state dict of torch)."
            )
        ranks = sorted(int(m[1]) for entry in folder.iterdir() if (m := RANK_NAME.fullmatch(entry.name)))
        info = _run_info(folder, ranks)
    except PermissionError as error:
        raise RunUnreadable(f"{error.filename or folder} may not be read by you: {error.strerror}.") from error
    return Run(folder, info, ranks)


class Run:
    """A run on disk; `open_run` makes one.

    Filters, wherever they are taken: `step`, `micro`, `phase`, `module`, `call`, `kind`, `path`, `cls`,
    `dtype`, `tensor` are one value or a container of values, module, path and cls with globs;
    `nonfinite=True` means tensors with a NaN or an infinity, `kept=True` those whose bytes were kept;
    `rank` is one or several.
    """

    on_disk = True
    """Whether tensors are spans of files, which other processes can read too."""
    in_memory = False
    """Whether it exists in this process alone, so that no command can open it."""
    is_checkpoint = False
    """Whether it holds the state of a model, as of no particular step."""
    only_module: str | None = None
    """The module of a file of one call. Two such files are of one module each, whatever it is called in either."""

    def __init__(self, path: Path, info: dict[str, Any], ranks: list[int]) -> None:
        self.path = path
        self.info = info
        self.ranks = ranks
        self._spans = Spans(path)
        self._indexes: dict[int, Index] = {}
        self._keys: dict[tuple[int, int], dict[Key, int]] = {}
        self._calls: dict[int, Calls | None] = {}
        files = [] if self.in_memory else ranks
        self._status = {rank: _rank_status(self._folder(rank) / RANK_JSON) for rank in files}
        self._coverage = {rank: _json_or_none(self._folder(rank) / COVERAGE_JSON) for rank in files}

    @property
    def finished(self) -> bool:
        """Whether all ranks that left anything were closed as finished."""
        return bool(self.ranks) and all(_field(status, "status") == "finished" for status in self._status.values())

    @property
    def failure(self) -> str:
        """Why the recording of a rank stopped before its end; empty if none did, or if nobody knows."""
        failed = (status for status in self._status.values() if _field(status, "status") == "failed")
        return next((str(_field(status, "reason") or "no reason was given") for status in failed), "")

    @cached_property
    def notices(self) -> list[str]:
        """What a reader of this run should know: what is missing, and what capture could not see."""
        found = []
        if missing := self._notice_of_ranks():
            found.append(missing)
        said: dict[str, list[int]] = {}
        for rank in self.ranks:
            texts = [
                self._notice_of_status(rank),
                self._notice_of_index(rank),
                self._notice_of_calls(rank),
                *self._notices_of_capture(rank),
            ]
            for text in filter(None, texts):
                said.setdefault(text, []).append(rank)
        return found + [f"{self._who(ranks)}: {text}" for text, ranks in said.items()]

    def _who(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            return f"rank {ranks[0]}"
        return "all ranks" if len(ranks) == len(self.ranks) else f"ranks {_few(ranks)}"

    @cached_property
    def coverage(self) -> dict[int, list[Coverage]]:
        """What was seen of each module, by rank."""
        return CoverageByRank(
            (rank, [coverage_from(row) for row in _field(value, "modules", [])])
            for rank, value in self._coverage.items()
        )

    @cached_property
    def steps(self) -> list[int]:
        """The steps that any rank has records of."""
        found = [np.unique(self._index(rank).steps) for rank in self.ranks]
        return [int(step) for step in np.unique(np.concatenate(found))] if found else []

    def __len__(self) -> int:
        return sum(len(self._index(rank)) for rank in self.ranks)

    def _repr_html_(self) -> str:
        return reports().run_html(self)

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def records(self, *, rank: int | Collection[int] | None = None, **filters: Any) -> Iterator[Record]:
        """The records that pass the filters, by rank, then in execution order."""
        chosen = Filter(**filters)
        for each in self._chosen_ranks(rank):
            index = self._index(each)
            places = chosen.rows(index.rows)
            for at in range(0, len(places), _CHUNK):
                yield from index.records(places[at : at + _CHUNK])

    def get(self, key: Key, rank: int = 0) -> Record | None:
        """The record of that identity, or None."""
        if rank not in self.ranks:
            return None
        spot = (rank, key.step)
        if spot not in self._keys:
            if len(self._keys) >= 8:  # callers go step by step
                self._keys.pop(next(iter(self._keys)))
            self._keys[spot] = self._index(rank).keys_of_step(key.step)
        place = self._keys[spot].get(Key(*key))
        return None if place is None else self._index(rank).records(np.array([place]))[0]

    def arguments(self, record: Record) -> dict[str, Any] | None:
        """Return the plain arguments of the record's call by path, with an `OpaqueValue` for each that was not kept.

        Return None if the record belongs to no call, as a parameter, or if arguments were not recorded.

        >>> run.arguments(record)                                              # doctest: +SKIP
        {'is_causal': True, 'scale': 0.125}
        """
        calls, key = self.calls(record.rank), record.key
        if calls is None or key.kind in STATE_KINDS:
            return None
        return read(calls.of(key.step, key.micro, key.module, key.call))

    def calls(self, rank: int) -> Calls | None:
        """The plain arguments of all calls of a rank; None if they were not recorded, or cannot be read."""
        if rank not in self._calls:
            try:
                self._calls[rank] = read_calls(self._folder(rank) / CALLS)
            except (OSError, ValueError):  # the notices say so
                self._calls[rank] = None
        return self._calls[rank]

    def at(self, rank: int, row: int) -> Record:
        """The record in that row of `index(rank)`."""
        return self._index(rank).records(np.array([row]))[0]

    def file(self, rank: int, name: str) -> Path:
        """Where a file that a rank's index names is, or will be once it is finished."""
        return self._spans.path_of(rank, name)

    def load(self, record: Record) -> npt.NDArray[Any]:
        """The tensor's values, read-only: a view of the file where its alignment allows, else a copy."""
        return as_array(self._spans.view(record), record.dtype, record.shape)

    def bytes_of(self, record: Record) -> memoryview:
        """The tensor's bytes, as they are in the file."""
        return self._spans.view(record)

    def torch(self, record: Record) -> Any:
        """The tensor as a torch.Tensor with memory of its own, the same bits."""
        try:
            torch = import_module("torch")
        except ImportError as error:
            raise MissingDependency("run.torch() needs torch: pip install torch") from error
        data = self._spans.read(record)
        dtype = getattr(torch, record.dtype)
        if not data.nbytes:
            return torch.empty(record.shape, dtype=dtype)
        return torch.frombuffer(data.obj, dtype=dtype).reshape(record.shape)

    def stream(
        self, *, rank: int | Collection[int] | None = None, **filters: Any
    ) -> Iterator[tuple[Record, npt.NDArray[Any]]]:
        """Records and their values in the order of the files: one tensor in memory at a time."""
        chosen = Filter(**{**filters, "kept": True})
        for each in self._chosen_ranks(rank):
            index = self._index(each)
            places = _in_file_order(index.rows, chosen.rows(index.rows))
            last, array = None, np.empty(0)
            for at in range(0, len(places), _CHUNK):
                for record in index.records(places[at : at + _CHUNK]):
                    if record.location != last:
                        array = as_array(self._spans.read(record), record.dtype, record.shape)
                        last = record.location
                    yield record, array

    def index(self, rank: int) -> Any:
        """The columns of one rank as a pyarrow.Table, in execution order; see store/format.py."""
        return self._index(rank).rows

    def sketches(self, rank: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """All sketches as rows of a matrix, and for each row of `index(rank)` which of them is its own."""
        index = self._index(rank)
        column = index.rows.column("sketch")
        having = np.unique(index.sketch_rows[index.sketch_rows >= 0])
        if not having.size:
            return np.empty((0, 0), np.float32), index.sketch_rows
        flat = np.concatenate([chunk.flatten().to_numpy() for chunk in column.chunks])
        which = np.cumsum(column.is_valid().to_numpy()) - 1
        rows = index.sketch_rows
        return flat.reshape(int(which[-1]) + 1, -1), np.where(rows >= 0, which[rows], -1)

    def to_arrow(self, rank: int | Collection[int] | None = None) -> Any:
        """The whole index as one pyarrow.Table, with a column for the rank."""
        tables = []
        for each in self._chosen_ranks(rank):
            rows = self.index(each)
            column = pa.array(np.full(rows.num_rows, each, np.int64))
            tables.append(rows.add_column(0, pa.field("rank", pa.int64(), False), column))
        return pa.concat_tables(tables) if tables else pa.table({"rank": pa.array([], pa.int64())})

    def to_pandas(self, rank: int | Collection[int] | None = None) -> Any:
        """The whole index as one pandas.DataFrame."""
        try:
            import_module("pandas")
        except ImportError as error:
            raise MissingDependency("run.to_pandas() needs pandas: pip install pandas") from error
        return self.to_arrow(rank).to_pandas()

    def close(self) -> None:
        """Let go of the files. Arrays that were loaded stay valid."""
        self._spans.close()
        self._indexes.clear()
        self._keys.clear()
        self._calls.clear()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, ranks={_few(self.ranks)})"

    def _folder(self, rank: int) -> Path:
        return self.path / rank_name(rank)

    def _index(self, rank: int) -> Index:
        if rank not in self.ranks:
            raise RunNotFound(f"{self.path} has no rank {rank}; it has {_few(self.ranks)}.")
        if rank not in self._indexes:
            self._indexes[rank] = Index(self._folder(rank) / INDEX, rank)
        return self._indexes[rank]

    def _chosen_ranks(self, rank: int | Collection[int] | None) -> list[int]:
        if rank is None:
            return self.ranks
        return [rank] if isinstance(rank, int) else [each for each in self.ranks if each in rank]

    def _notice_of_ranks(self) -> str:
        world = self.info.get("world", 0)
        chosen = (self.info.get("config") or {}).get("ranks") is not None  # the others were meant to leave nothing
        return "" if chosen else _missing_ranks(world, self.ranks)

    def _notice_of_status(self, rank: int) -> str:
        status = self._status[rank]
        if status is None:
            return f"{RANK_JSON} is missing or damaged: whether the rank finished is not known"
        if _field(status, "status") == "failed":
            return f"it failed: {_field(status, 'reason') or 'no reason was given'}"
        if _field(status, "status") != "finished":
            so_far = len(self._index(rank))
            return f"it was not closed: it is still running, or was killed; {so_far} records so far"
        return ""

    def _notice_of_index(self, rank: int) -> str:
        index = self._index(rank)
        if index.missing:
            return "it has no index: it was killed as it began, or the copy is not whole"
        if index.lost:
            return (
                f"the last batch of the index was cut off ({index.lost} bytes); "
                f"{len(index)} records before it are intact"
            )
        if _field(self._status[rank], "status") == "finished" and not index.complete:
            return f"the index ends early, though the rank finished; {len(index)} records are intact"
        return ""

    def _notice_of_calls(self, rank: int) -> str:
        if self.calls(rank) is None and (self._folder(rank) / CALLS).exists():
            return f"{CALLS} cannot be read: plain arguments are not known"
        return ""

    def _notices_of_capture(self, rank: int) -> list[str]:
        return [str(text) for text in _field(self._coverage[rank], "notices", [])]


def _run_info(folder: Path, ranks: list[int]) -> dict[str, Any]:
    path = folder / RUN_JSON
    try:
        value = read_json(path)
    except FileNotFoundError:
        if ranks:
            raise RunUnreadable(f"{path} is missing: {folder} looks like a run whose copy is not whole.") from None
        raise RunUnreadable(f"{folder} is not a run: it has no {RUN_JSON}. {_looks_like(folder)}") from None
    except ValueError as error:
        raise RunUnreadable(f"{path} is damaged: {error}") from error
    return check_run_info(value, str(path))


def _looks_like(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return "The folder is empty."
    inside = [name for name in names if (folder / name / RUN_JSON).is_file()]
    if inside:
        return f"It has runs in it: {_few(inside)}. Open one of them."
    return f"It holds {_few(names)}."


def _missing_ranks(world: int, ranks: Collection[int]) -> str:
    """A notice of ranks without a folder. Takes time by the folders: `world` may be any number in a damaged file."""
    present = {rank for rank in ranks if rank < world}
    count = world - len(present)
    if not count:
        return ""
    first = list(islice((rank for rank in range(world) if rank not in present), min(count, _SHOWN)))
    return f"{count} of {world} ranks left nothing: {_few(first, count)}"


def _few(values: Collection[Any], count: int | None = None) -> str:
    """The first of the values; `count` is how many there are if only the first are given."""
    count = len(values) if count is None else count
    shown = ", ".join(str(value) for value in islice(values, _SHOWN))
    return shown + (f", … ({count} in all)" if count > _SHOWN else "")


def _rank_status(path: Path) -> dict[str, Any] | None:
    status = _json_or_none(path)
    if isinstance(version := _field(status, "version"), int):
        check_version(version, str(path))
    return status


def _json_or_none(path: Path) -> dict[str, Any] | None:
    """What is in a file that a run can be read without."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _field(value: dict[str, Any] | None, name: str, default: Any = None) -> Any:
    return default if value is None else value.get(name, default)


def _in_file_order(rows: Any, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if not places.size:
        return places
    taken = rows.select(["file", "offset"]).take(pa.array(places))
    files = taken.column("file").combine_chunks().dictionary_encode().indices.to_numpy()
    return places[np.lexsort((taken.column("offset").to_numpy(), files))]

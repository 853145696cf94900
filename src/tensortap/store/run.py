"""The Run contract: users see `Run`, and a reader implements `RunSource`.

A reader derives from RunSource, passes path, info and ranks to its constructor, and implements `read_index` and `view`.
Every other method has a default. `Run` adds filters, loading, tables and iteration, the same for all readers, and turns
every error of a reader into a TensortapError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.core.arguments import read
from tensortap.core.placement import Mesh, Placement
from tensortap.core.presentation import CoverageByRank, reports
from tensortap.core.records import STATE_KINDS, Coverage, Key, Record
from tensortap.core.urls import Place, as_place
from tensortap.errors import MissingDependency, RunNotFound, RunUnreadable, TensortapError, shorten
from tensortap.store.calls import Calls
from tensortap.store.compact import joined
from tensortap.store.format import without_sketch
from tensortap.store.index import Index
from tensortap.store.loop import LoopFacts
from tensortap.store.query import Filter
from tensortap.store.source import as_array
from tensortap.store.verification import Verification, check_digest, verify_run

__all__ = ["Run", "RunSource", "first_few", "reading", "reason_of"]

_CHUNK = 1024
_SHOWN = 8
"""Values that a message lists before it only counts."""
_MOST_STEPS = 8
_LONGEST_REASON = 800
_WINDOW = 32 << 20
"""Bytes that are requested together."""

Self = TypeVar("Self", bound="Run")


class RunSource(ABC):
    """The contract of a reader: ranks, an index for each, and the bytes of its records."""

    on_disk = False
    """Whether each kept tensor is a range of a named object, which other processes can read. See `address`."""
    in_memory = False
    """Whether the run exists in this process alone, so that no command can open it."""
    is_checkpoint = False
    """Whether the run holds the state of a model at no particular step."""
    only_module: str | None = None
    """The module of a file of one call. Two such files are compared regardless of the module's name in either."""

    def __init__(self, path: Place, info: Mapping[str, Any], ranks: Iterable[int]) -> None:
        """`info` has at least framework, model, world and config, if they are known."""
        self.path: Any = path
        """The Path of the run; a Url if it is in an object store, which only the readers of such runs have to know."""
        self.info = dict(info)
        self.ranks = sorted(set(ranks))
        self._indexes: dict[int, Index] = {}

    def index(self, rank: int) -> Index:
        """Return the index of a rank, which `read_index` reads on first use."""
        if rank not in self.ranks:
            raise RunNotFound(f"{self.path} has no rank {rank}; it has {first_few(self.ranks)}.")
        if rank not in self._indexes:
            self._indexes[rank] = self.read_index(rank)
        return self._indexes[rank]

    @abstractmethod
    def read_index(self, rank: int) -> Index:
        """Read the records of a rank."""

    @abstractmethod
    def view(self, record: Record) -> memoryview:
        """Return the bytes of a kept tensor in C order and native byte order, without a copy where possible."""

    def read(self, record: Record) -> memoryview:
        """Return a copy of the bytes, for a pass over a whole run with one tensor in memory at a time."""
        return memoryview(bytearray(self.view(record))).toreadonly()

    def address(self, rank: int, file: str) -> str:
        """Return the name of the object behind a location of the index, for `AddressedFiles` in any process."""
        return str(self.path / file)

    def prefetch(self, records: Iterable[Record]) -> None:  # noqa: B027  # most media need no preparation
        """Prepare for reading these records soon. Only a medium where each request takes time has to."""

    def stored_bytes(self) -> int:
        """Return the bytes of all files of the run."""
        if not isinstance(self.path, Path):
            return 0
        total = 0
        for path in [self.path, *self.path.rglob("*")]:
            with suppress(FileNotFoundError):  # a run that is still being written renames its files
                total += path.stat().st_size if path.is_file() else 0
        return total

    def finished(self) -> bool:
        """Return whether the run was written to its end."""
        return True

    def failure(self) -> str:
        """Return why the recording stopped early; an empty text if it did not, or if the reason is unknown."""
        return ""

    def unreadable(self) -> list[str]:
        """Return the names of tensors of the run that cannot be read, so that their records are missing."""
        return []

    def notices(self) -> list[str]:
        """Return notices about the run: what is missing, and what could not be read."""
        return []

    def coverage(self) -> dict[int, list[Coverage]]:
        """Return the coverage of each module, by rank."""
        return {}

    def calls(self, rank: int) -> Calls | None:
        """Return the plain arguments of all calls of a rank; None if they were not recorded."""
        return None

    def loop(self, rank: int) -> LoopFacts | None:
        """Return the loop facts of a rank; None if they were not recorded."""
        return None

    def mesh(self, rank: int) -> Mesh | None:
        """Return the mesh of a rank; None if it is not known."""
        return None

    def renames(self, rank: int) -> Mapping[str, str]:
        """Return the global names of modules by the names in the rank's own model, where they differ."""
        return {}

    def steps(self) -> list[int] | None:
        """Return the steps if they are known without an index; else None."""
        return None

    def spellings(self, module: str) -> Sequence[str]:
        """Return the names under which a filter finds a module, if the format accepts others than its own."""
        return (module,)

    def close(self) -> None:
        """Release files. Later requests read them again."""
        self._indexes.clear()


class Run:
    """A run; `tensortap.open` returns one.

    Filters, in all methods that accept them: `step`, `micro`, `phase`, `module`, `call`, `kind`, `path`, `cls`,
    `dtype`, `tensor` are one value or a container of values; module, path and cls may be globs.
    `nonfinite=True` selects tensors with a NaN or an infinity, `kept=True` those whose bytes were kept.
    `rank` is one or several.
    """

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self.path = source.path
        self.info = source.info
        self.ranks = source.ranks
        self._keys: dict[tuple[int, int], dict[Key, int]] = {}

    @property
    def on_disk(self) -> bool:
        """Whether tensors are ranges of files, which other processes can read."""
        return self.source.on_disk

    @property
    def in_memory(self) -> bool:
        """Whether the run exists in this process alone, so that no command can open it."""
        return self.source.in_memory

    @property
    def is_checkpoint(self) -> bool:
        """Whether the run holds the state of a model at no particular step."""
        return self.source.is_checkpoint

    @property
    def only_module(self) -> str | None:
        """The module of a file of one call; None for all other runs."""
        return self.source.only_module

    @property
    def finished(self) -> bool:
        """Whether all ranks that left anything were closed as finished."""
        with reading(self.path):
            return self.source.finished()

    @property
    def failure(self) -> str:
        """Why the recording of a rank stopped before its end; empty if none did, or if the reason is unknown."""
        with reading(self.path):
            return self.source.failure()

    @property
    def unreadable(self) -> list[str]:
        """Names of tensors of the run that cannot be read, so that their records are missing."""
        with reading(self.path):
            return self.source.unreadable()

    @property
    def notices(self) -> list[str]:
        """Notices about this run: missing parts, and tensors that capture could not see."""
        with reading(self.path):
            return self.source.notices()

    @property
    def coverage(self) -> dict[int, list[Coverage]]:
        """The coverage of each module, by rank."""
        with reading(self.path):
            return CoverageByRank(self.source.coverage())

    @cached_property
    def steps(self) -> list[int]:
        """The steps that any rank has records of; evaluation alone makes no step, unless there is nothing else."""
        return self._steps(training=True) or self._steps(training=False)

    @property
    def recorded_steps(self) -> list[int]:
        """The steps that any rank has records of, also of an evaluation alone, as after the last step."""
        return self._steps(training=False)

    def _steps(self, training: bool) -> list[int]:
        with reading(self.path):
            known = self.source.steps()
        if known is not None:
            return known
        found = [
            np.unique(self._index(rank).training_steps if training else self._index(rank).steps) for rank in self.ranks
        ]
        return [int(step) for step in np.unique(np.concatenate(found))] if found else []

    def __len__(self) -> int:
        return sum(len(self._index(rank)) for rank in self.ranks)

    def _repr_html_(self) -> str:
        return reports().run_html(self)

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def records(self, *, rank: int | Collection[int] | None = None, **filters: Any) -> Iterator[Record]:
        """Return the records that pass the filters, by rank, then in execution order."""
        chosen = self._filter(filters)
        return self._records(chosen, self._chosen_ranks(rank))

    def get(self, key: Key, rank: int = 0) -> Record | None:
        """Return the record with this identity, or None."""
        if rank not in self.ranks:
            return None
        spot = (rank, key.step)
        if spot not in self._keys:
            if len(self._keys) >= _MOST_STEPS:  # callers go step by step
                self._keys.pop(next(iter(self._keys)))
            self._keys[spot] = self._index(rank).keys_of_step(key.step)
        row = self._keys[spot].get(Key(*key))
        return None if row is None else self.at(rank, row)

    def arguments(self, record: Record) -> dict[str, Any] | None:
        """Return the plain arguments of the record's call by path, with an `OpaqueValue` for each that was not kept.

        Return None if the record belongs to no call, as a parameter, or if arguments were not recorded, as those of an
        evaluation.

        >>> run.arguments(record)                                              # doctest: +SKIP
        {'is_causal': True, 'scale': 0.125}
        """
        calls, key = self.calls(record.rank), record.key
        if calls is None or key.kind in STATE_KINDS or key.phase == "eval":
            return None
        return read(calls.of(key.step, key.micro, key.module, key.call))

    def calls(self, rank: int) -> Calls | None:
        """Return the plain arguments of all calls of a rank; None if they were not recorded, or cannot be read."""
        with reading(self.path):
            return self.source.calls(rank)

    def loop(self, rank: int | None = None) -> LoopFacts:
        """Return the facts about the training loop beside tensors, as a rank saw them; without `rank`, the first rank.

        The result is empty, and false, if nothing is known: no run of tensortap's own, or one of an older version.

        >>> run.loop().value("group", 3, "0.0")                                # doctest: +SKIP
        {'lr': 0.0003, 'betas': (0.9, 0.999), 'eps': 1e-08, 'weight_decay': 0.01}
        """
        if rank is None:
            rank = next(iter(self.ranks), None)
        elif rank not in self.ranks:
            raise RunNotFound(f"{self.path} has no rank {rank}; it has {first_few(self.ranks)}.")
        with reading(self.path):
            found = None if rank is None else self.source.loop(rank)
        return LoopFacts() if found is None else found

    def placements(self, rank: int) -> Sequence[Placement]:
        """Return the placements of a rank, by their numbers in the column `placement` of `index(rank)`."""
        return self._index(rank).placements

    def mesh(self, rank: int) -> Mesh | None:
        """Return the axes of the run's processes and the position of this one; None if they are not known.

        >>> run.mesh(1)                                                        # doctest: +SKIP
        Mesh(names=('dp', 'tp'), sizes=(2, 2), coordinates=(0, 1))
        """
        with reading(self.path):
            return self.source.mesh(rank)

    def renames(self, rank: int) -> Mapping[str, str]:
        """Return the names of records by the names that modules have in the rank's own model, where they differ."""
        with reading(self.path):
            return self.source.renames(rank)

    def at(self, rank: int, row: int) -> Record:
        """Return the record in a row of `index(rank)`."""
        with reading(self.path):
            return self.source.index(rank).records(np.array([row]))[0]

    def file(self, rank: int, name: str) -> Place:
        """Return the place of a file that a rank's index names. An unfinished file gets it once it is finished."""
        with reading(self.path):
            return as_place(self.source.address(rank, name))

    def load(self, record: Record, verify: bool = False) -> npt.NDArray[Any]:
        """Return the tensor's values, read-only: a view of the file where its alignment allows, else a copy.

        With `verify`, raise RunUnreadable if they do not have the digest that was recorded.
        """
        with reading(self.path):
            array = as_array(self.source.view(record), record.dtype, record.shape)
            if verify:
                check_digest(record, array)
            return array

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Verification:
        """Check the bytes of all kept tensors against their digests, and return which are damaged.

        >>> run.verify().ok                                                    # doctest: +SKIP
        True
        """
        return verify_run(self, progress)

    def bytes_of(self, record: Record) -> memoryview:
        """Return the tensor's bytes, as they are in the file."""
        with reading(self.path):
            return self.source.view(record)

    def torch(self, record: Record) -> Any:
        """Return a bit-identical copy of the tensor as a torch.Tensor."""
        try:
            torch = import_module("torch")
        except ImportError as error:
            raise MissingDependency("run.torch() needs torch: pip install torch") from error
        with reading(self.path):
            data = self.source.read(record)
        dtype = getattr(torch, record.dtype)
        if not data.nbytes:
            return torch.empty(record.shape, dtype=dtype)
        return torch.frombuffer(data.obj, dtype=dtype).reshape(record.shape)

    def stream(
        self, *, rank: int | Collection[int] | None = None, **filters: Any
    ) -> Iterator[tuple[Record, npt.NDArray[Any]]]:
        """Yield records and their values in the order of the files: one tensor in memory at a time."""
        chosen = self._filter({**filters, "kept": True})
        for each in self._chosen_ranks(rank):
            rows = self._index(each).columns
            last, array = None, np.empty(0)
            for record in self.ahead(self._at(each, _in_file_order(rows, chosen.rows(rows)))):
                if record.location != last:
                    with reading(self.path):
                        array = as_array(self.source.read(record), record.dtype, record.shape)
                    last = record.location
                yield record, array

    def ahead(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records. Some megabytes of their bytes are requested together where each request takes time."""
        window: list[Record] = []
        held = 0
        for record in records:
            window.append(record)
            held += record.location.nbytes if record.location is not None else 0
            if held >= _WINDOW:
                self.source.prefetch(window)
                yield from window
                window, held = [], 0
        self.source.prefetch(window)
        yield from window

    def index(self, rank: int) -> Any:
        """Return the columns of one rank as a pyarrow.Table, in execution order; see store/format.py."""
        return self._index(rank).rows

    def columns(self, rank: int) -> Any:
        """Return the columns of one rank as `index` does, but without sketches, which take most of the memory, and with
        coded strings."""
        return self._index(rank).columns

    def join_columns(self, ranks: Sequence[int]) -> Any:
        """Return the columns of several ranks as one table. The columns of each rank become a slice of it, so that
        they are in memory once."""
        indexes = [self._index(rank) for rank in ranks]
        if not indexes:
            return without_sketch().empty_table()
        whole, begin = joined([index.columns for index in indexes]), 0
        for index in indexes:
            index.columns = whole.slice(begin, len(index))
            begin += len(index)
        return whole

    def sketch_rows(self, rank: int) -> npt.NDArray[np.int64]:
        """Return for each row of `index(rank)` the row that has the sketch of its tensor; -1 if there is none."""
        with reading(self.path):
            return self._index(rank).sketch_rows

    def sketches_at(self, rank: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the sketches of rows of `index(rank)` as a matrix, read in batches. All of them must have one."""
        with reading(self.path):
            return self._index(rank).sketches_at(rows)

    def release_sketches(self, rank: int) -> None:
        """Release the sketches of `index(rank)` that were read and are kept for later."""
        self._index(rank).release_sketches()

    def sketches(self, rank: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Return all sketches as rows of a matrix, and for each row of `index(rank)` which of them is its own."""
        with reading(self.path):
            return self._index(rank).sketches()

    def to_arrow(self, rank: int | Collection[int] | None = None) -> Any:
        """Return the whole index as one pyarrow.Table, with a column for the rank."""
        tables = []
        for each in self._chosen_ranks(rank):
            rows = self.index(each)
            column = pa.array(np.full(rows.num_rows, each, np.int64))
            tables.append(rows.add_column(0, pa.field("rank", pa.int64(), False), column))
        return pa.concat_tables(tables) if tables else pa.table({"rank": pa.array([], pa.int64())})

    def to_pandas(self, rank: int | Collection[int] | None = None) -> Any:
        """Return the whole index as one pandas.DataFrame."""
        try:
            import_module("pandas")
        except ImportError as error:
            raise MissingDependency("run.to_pandas() needs pandas: pip install pandas") from error
        return self.to_arrow(rank).to_pandas()

    def close(self) -> None:
        """Release the files. Loaded arrays stay valid, and later requests read the files again."""
        self.source.close()
        self._keys.clear()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, ranks={first_few(self.ranks)})"

    def _index(self, rank: int) -> Index:
        with reading(self.path):
            return self.source.index(rank)

    def _records(self, chosen: Filter, ranks: Sequence[int]) -> Iterator[Record]:
        for rank in ranks:
            yield from self._at(rank, chosen.rows(self._index(rank).columns))

    def _at(self, rank: int, rows: npt.NDArray[np.int64]) -> Iterator[Record]:
        index = self._index(rank)
        for at in range(0, len(rows), _CHUNK):
            with reading(self.path):
                found = index.records(rows[at : at + _CHUNK])
            yield from found

    def _filter(self, filters: dict[str, Any]) -> Filter:
        module = filters.get("module")
        if isinstance(module, str) and len(names := self.source.spellings(module)) > 1:
            filters = {**filters, "module": names}
        return Filter(**filters)

    def _chosen_ranks(self, rank: int | Collection[int] | None) -> list[int]:
        if rank is None:
            return self.ranks
        return [rank] if isinstance(rank, int) else [each for each in self.ranks if each in rank]


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Turn every error of a reader into RunUnreadable: a damaged file can make any library raise anything."""
    try:
        yield
    except TensortapError:
        raise
    except OSError as error:
        raise RunUnreadable(f"{error.filename or path} cannot be read: {reason_of(error)}.") from error
    except Exception as error:
        raise RunUnreadable(f"{path} cannot be read: {reason_of(error)}.") from error


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error as one short line without a full stop."""
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = shorten(" ".join(str(error).split()), _LONGEST_REASON).rstrip(".")
    if isinstance(error, (TensortapError, OSError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_few(values: Collection[Any], count: int | None = None) -> str:
    """Return the first values as text; `count` is how many there are if only the first are given."""
    count = len(values) if count is None else count
    shown = ", ".join(shorten(str(value)) for value in islice(values, _SHOWN))
    return shown + (f", … ({count} in all)" if count > _SHOWN else "")


def _in_file_order(rows: Any, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if not places.size:
        return places
    chosen = rows.select(["file", "offset"]).take(pa.array(places))
    files = chosen.column("file").combine_chunks().dictionary_encode().indices.to_numpy()
    return places[np.lexsort((chosen.column("offset").to_numpy(), files))]

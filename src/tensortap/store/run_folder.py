"""Reads a run that tensortap wrote, lazily; also one that was killed, or is still being written."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tensortap.core.placement import Mesh
from tensortap.core.records import Coverage, Record
from tensortap.core.urls import Place, Url, as_place
from tensortap.errors import RunNotFound, RunUnreadable, TensortapError
from tensortap.store.calls import Calls, read_calls
from tensortap.store.format import (
    CALLS,
    COVERAGE_JSON,
    INDEX,
    LOOP,
    PARTIAL,
    PLACEMENTS,
    RANK_JSON,
    RANK_NAME,
    RING_PREFIX,
    RUN_JSON,
    SHARD_NAME,
    rank_name,
)
from tensortap.store.index import Index, read_index
from tensortap.store.loop import LoopFacts, read_loop
from tensortap.store.metadata import CoverageFile, RankStatus, check_run_info, parse_coverage, parse_rank_status
from tensortap.store.run import Run, RunSource, first_few, reading
from tensortap.store.segments import segments_of
from tensortap.store.source import Bytes, Range, files_below, kept_location, read_json

__all__ = ["RunFolder", "open_run", "open_source", "recognizes"]

_SHOWN = 8
_MOST_SEARCHED = 100


def open_run(path: str | os.PathLike[str] | Url) -> Run:
    """Open a run's folder. Indexes are mapped when asked for, tensors when loaded.

    >>> run = open_run("runs/a")                                               # doctest: +SKIP
    >>> for record in run.records(module="layers.0.*", nonfinite=True):        # doctest: +SKIP
    ...     print(record.key, record.summary.nan)
    """
    place = as_place(path)
    with reading(place):
        return Run(open_source(place))


def recognizes(path: Path) -> bool:
    """Return whether a folder has a run.json."""
    return (path / RUN_JSON).exists()


def open_source(path: Place, summarize: Callable[[Any], Any] | None = None, files: Bytes | None = None) -> RunFolder:
    """Open a run's folder, on disk or behind a URL. It has its own summaries, so `summarize` is not used.

    `files` are those of the folder, if they were listed before.
    """
    files = files or files_below(path)
    try:
        if isinstance(path, Path):
            _check_folder(path)
        names = files.names()
        if not names and isinstance(path, Url):
            raise RunNotFound(f"{path} does not exist: no run to open. Check the bucket and the name.")
        ranks = sorted(int(m[1]) for name in names if (m := RANK_NAME.fullmatch(name)))
        info = _run_info(path, files, names, ranks)
    except PermissionError as error:
        raise RunUnreadable(f"{error.filename or path} cannot be read, permission denied: {error.strerror}.") from error
    return RunFolder(path, files, info, ranks)


def _check_folder(path: Path) -> None:
    if not path.exists():
        raise RunNotFound(f"{path} does not exist: no run to open.")
    if not path.is_dir():
        raise RunUnreadable(
            f"{path} is a file of no known format. Open the folder of a run, an .npz or .hdf5 file, or a "
            "checkpoint (.safetensors, or a state dict of torch)."
        )


class RunFolder(RunSource):
    """The folder of a run; store/format.py describes its files."""

    on_disk = True

    def __init__(self, path: Place, files: Bytes, info: dict[str, Any], ranks: list[int]) -> None:
        super().__init__(path, info, ranks)
        self._files = files
        self._calls: dict[int, Calls | None] = {}
        self._loops: dict[int, LoopFacts | None] = {}
        for rank in self.ranks if isinstance(path, Url) else ():
            self._fetch_metadata(rank)
        self._status = {rank: self._read_status(rank) for rank in self.ranks}
        self._coverage = {rank: self._read_coverage(rank) for rank in self.ranks}

    def read_index(self, rank: int) -> Index:
        folder_name = rank_name(rank)
        index = read_index(self._files, f"{folder_name}/{INDEX}", rank, f"{folder_name}/{PLACEMENTS}")
        files = index.columns.column("file")
        named = [name for name in pc.unique(files).to_pylist() if name is not None and name.startswith(RING_PREFIX)]
        if named:
            there = set(self._files.names(folder_name))
            gone = [name for name in named if not {name, name + PARTIAL} & there]
            index.forget(pc.is_in(files, pa.array(gone, pa.string())).to_pylist())
        return index

    def view(self, record: Record) -> memoryview:
        location = kept_location(record)
        return self._files.view(self._shard(record.rank, location.file), location.offset, location.nbytes)

    def read(self, record: Record) -> memoryview:
        location = kept_location(record)
        return self._files.read(self._shard(record.rank, location.file), location.offset, location.nbytes)

    def address(self, rank: int, file: str) -> str:
        return self._files.address(self._shard(rank, file))

    def prefetch(self, records: Iterable[Record]) -> None:
        self._files.prefetch(
            Range(self._shard(record.rank, record.location.file), record.location.offset, record.location.nbytes)
            for record in records
            if record.location is not None
        )

    def stored_bytes(self) -> int:
        if isinstance(self.path, Path):
            return super().stored_bytes()
        names = [each for each in self._files.names() if not RANK_NAME.fullmatch(each)]
        names += [f"{rank_name(rank)}/{each}" for rank in self.ranks for each in self._files.names(rank_name(rank))]
        return sum(map(self._files.size, names))

    def finished(self) -> bool:
        return bool(self.ranks) and all(status and status.status == "finished" for status in self._status.values())

    def failure(self) -> str:
        failed = (status for status in self._status.values() if status and status.status == "failed")
        return next((status.reason or "no reason was given" for status in failed), "")

    def coverage(self) -> dict[int, list[Coverage]]:
        return {rank: known.modules if known else [] for rank, known in self._coverage.items()}

    def calls(self, rank: int) -> Calls | None:
        if rank not in self._calls:
            try:
                self._calls[rank] = read_calls(self._files, f"{rank_name(rank)}/{CALLS}")
            except (OSError, ValueError):  # the notices report it
                self._calls[rank] = None
        return self._calls[rank]

    def loop(self, rank: int) -> LoopFacts | None:
        if rank not in self._loops:
            try:
                self._loops[rank] = read_loop(self._files, f"{rank_name(rank)}/{LOOP}")
            except (OSError, ValueError):  # the notices report it
                self._loops[rank] = None
        return self._loops[rank]

    def mesh(self, rank: int) -> Mesh | None:
        status = self._status.get(rank)
        return None if status is None else status.mesh

    def renames(self, rank: int) -> Mapping[str, str]:
        status = self._status.get(rank)
        return {} if status is None else status.renames

    def notices(self) -> list[str]:
        return self._notices

    def close(self) -> None:
        super().close()
        self._files.close()
        self._calls.clear()
        self._loops.clear()

    @cached_property
    def _notices(self) -> list[str]:
        found = []
        chosen = (self.info.get("config") or {}).get("ranks") is not None  # the others were not meant to write
        if not chosen and (missing := _missing_ranks(self.info["world"], self.ranks)):
            found.append(missing)
        by_text: dict[str, list[int]] = {}
        for rank in self.ranks:
            known = self._coverage[rank]
            texts = [
                self._notice_of_status(rank),
                self._notice_of_index(rank),
                self._notice_of_columns(rank),
                str(self.index(rank).dropped or ""),
                self._notice_of_lines(rank, CALLS, self.calls(rank), "plain arguments are not known"),
                self._notice_of_lines(rank, LOOP, self.loop(rank), "facts about the loop are not known"),
                "" if known else f"{COVERAGE_JSON} is damaged: the coverage of each module is not known",
                *(known.notices if known else ()),
            ]
            for text in dict.fromkeys(filter(None, texts)):
                by_text.setdefault(text, []).append(rank)
        return found + [f"{self._name_ranks(ranks)}: {text}" for text, ranks in by_text.items()]

    def _name_ranks(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            return f"rank {ranks[0]}"
        return "all ranks" if len(ranks) == len(self.ranks) else f"ranks {first_few(ranks)}"

    def _notice_of_status(self, rank: int) -> str:
        status = self._status[rank]
        if status is None:
            return f"{RANK_JSON} is missing or damaged: whether the rank finished is not known"
        if status.status == "failed":
            return f"it failed: {status.reason or 'no reason was given'}"
        if status.status != "finished":
            so_far = len(self.index(rank))
            return f"it was not closed: it is still running, or was killed; {so_far} records so far"
        return ""

    def _notice_of_index(self, rank: int) -> str:
        index, status = self.index(rank), self._status[rank]
        if index.missing:
            return "it has no index: it was killed as it began, or the copy is incomplete"
        if index.dropped_segments:
            return (
                f"a segment of the index is missing or cut off, and {index.dropped_segments} after it are left out; "
                f"{len(index)} records before it are intact"
            )
        if index.lost:
            return (
                f"the last {index.lost} bytes of the index are cut off or damaged; "
                f"{len(index)} records before them are intact"
            )
        if status is not None and status.status == "finished" and not index.complete:
            return f"the index ends early, though the rank finished; {len(index)} records are intact"
        return ""

    def _notice_of_columns(self, rank: int) -> str:
        if not (unknown := self.index(rank).unknown):
            return ""
        return f"the index has statistics that are not registered here and are left out: {first_few(unknown)}"

    def _notice_of_lines(self, rank: int, name: str, found: object, unknown: str) -> str:
        folder = rank_name(rank)
        if found is None and (self._files.exists(f"{folder}/{name}") or segments_of(self._files, f"{folder}/{name}")):
            return f"{name} cannot be read: {unknown}"
        return ""

    def _shard(self, rank: int, file: str) -> str:
        """Return the name of a file of tensors. The index may come from anywhere: it must not name other files."""
        if not SHARD_NAME.fullmatch(file):
            raise RunUnreadable(f"{self.path}: the index of rank {rank} is damaged; it names a file {file!r}.")
        return f"{rank_name(rank)}/{file}"

    def _fetch_metadata(self, rank: int) -> None:
        """Read the small files of a rank together: each request takes as long as the next."""
        names = [f"{rank_name(rank)}/{name}" for name in (RANK_JSON, COVERAGE_JSON)]
        self._files.prefetch(Range(name, 0, self._files.size(name)) for name in names if self._files.exists(name))

    def _read_status(self, rank: int) -> RankStatus | None:
        name = f"{rank_name(rank)}/{RANK_JSON}"
        try:
            return parse_rank_status(read_json(self._files, name), self._files.address(name))
        except TensortapError:
            raise
        except (OSError, ValueError):
            return None

    def _read_coverage(self, rank: int) -> CoverageFile | None:
        """Return the contents of a rank's coverage.json: nothing if there is no file, None if it is damaged."""
        try:
            return parse_coverage(read_json(self._files, f"{rank_name(rank)}/{COVERAGE_JSON}"))
        except FileNotFoundError:
            return CoverageFile()
        except TensortapError:
            raise
        except (OSError, ValueError):
            return None


def _run_info(folder: Place, files: Bytes, names: list[str], ranks: list[int]) -> dict[str, Any]:
    path = folder / RUN_JSON
    try:
        value = read_json(files, RUN_JSON)
    except FileNotFoundError:
        if ranks:
            raise RunUnreadable(f"{path} is missing: {folder} looks like an incomplete copy of a run.") from None
        raise RunUnreadable(f"{folder} is not a run: it has no {RUN_JSON}. {_describe(files, names)}") from None
    except TensortapError:
        raise
    except ValueError as error:
        raise RunUnreadable(f"{path} is damaged: {error}") from error
    return check_run_info(value, str(path))


def _describe(files: Bytes, names: list[str]) -> str:
    """Describe the contents of a folder that is not a run."""
    names = sorted(names)
    if not names:
        return "The folder is empty."
    inside = [name for name in names[:_MOST_SEARCHED] if RUN_JSON in files.names(name)]
    if inside:
        return f"It has runs in it: {first_few(inside)}. Open one of them."
    return f"It holds {first_few(names)}."


def _missing_ranks(world: int, ranks: Collection[int]) -> str:
    """Return a notice of ranks without a folder. Its time does not depend on `world`, which a damaged file chooses."""
    present = {rank for rank in ranks if rank < world}
    count = world - len(present)
    if not count:
        return ""
    first = list(islice((rank for rank in range(world) if rank not in present), min(count, _SHOWN)))
    return f"{count} of {world} ranks left nothing: {first_few(first, count)}"

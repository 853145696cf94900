"""Copies one rank of a run from this disk into an object store, in an order that leaves it readable at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensortap.core.file_io import free_range
from tensortap.core.urls import Url, filesystem, upload_error
from tensortap.errors import RunExists, TensortapError
from tensortap.store.folder import as_text
from tensortap.store.format import (
    CALLS,
    COVERAGE_JSON,
    FORMAT,
    INDEX,
    LOOP,
    PARTIAL,
    PLACEMENTS,
    PROGRESS_JSON,
    RANK_JSON,
    RANK_NAME,
    RING_PREFIX,
    RUN_JSON,
    SEGMENT_NAME,
    SHARD_NAME,
    rank_name,
    segment_name,
)
from tensortap.store.remote import RemoteFiles
from tensortap.store.segments import segments_of
from tensortap.store.source import Bytes, LocalFiles, read_json

__all__ = ["RankUpload", "claim_url", "clear_rank", "is_same_recording", "upload_run_info"]

_LINES = (CALLS, LOOP, PLACEMENTS)


class RankUpload:
    """One rank: the folder `folder` of this disk, and the folder `rank_N` below `url`.

    Tensors go first, then lines, then the rows that refer to both. `advanced` is called with the bytes that were sent.
    With `frees`, uploaded data is deleted here.
    """

    def __init__(
        self, folder: Path, url: Url, rank: int, frees: bool, advanced: Callable[[int], None] = lambda _: None
    ) -> None:
        self.folder = folder
        self.url = url / rank_name(rank)
        self.ends: dict[str, int] = {}
        """Bytes of each growing file that are uploaded."""
        self._frees = frees
        self._advanced = advanced
        self._sent: dict[str, tuple[int, int]] = {}

    def resume(self) -> None:
        """Determine what an earlier process has uploaded."""
        files = RemoteFiles(self.url)
        for name in (*_LINES, INDEX):
            if segments := segments_of(files, name):
                end = 0
                for segment in segments:
                    end = segment.offset + segment.nbytes if segment.offset == end else end
                self.ends[name] = end

    def shards(self, ring: bool = False, unfinished: bool = False) -> Iterator[Path]:
        """Yield the files of tensors: those of a ring or the others, finished or not."""
        for path in sorted(self.folder.iterdir()):
            name = path.name.removesuffix(PARTIAL)
            is_wanted = name.startswith(RING_PREFIX) == ring and path.name.endswith(PARTIAL) == unfinished
            if SHARD_NAME.fullmatch(name) and is_wanted:
                yield path

    def upload_shard(self, path: Path) -> int:
        """Upload a file of tensors; return the bytes of its tensors."""
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little") + 8
        self._send(path, self.url / path.name)
        if self._frees:
            path.unlink()
        return max(0, nbytes - header)

    def upload_lines(self) -> None:
        """Upload the whole lines that are new in the files beside the index."""
        for name in _LINES:
            path, begin = self.folder / name, self.ends.get(name, 0)
            if path.exists():
                with path.open("rb") as file:
                    file.seek(begin)
                    data = file.read()
                self._upload_segment(name, begin, data[: data.rfind(b"\n") + 1])

    def upload_rows(self, end: int | None = None) -> None:
        """Upload the rows that are new in the index, up to an offset; None is its end."""
        path, begin = self.folder / INDEX, self.ends.get(INDEX, 0)
        if path.exists():
            with path.open("rb") as file:
                file.seek(begin)
                self._upload_segment(INDEX, begin, file.read() if end is None else file.read(max(0, end - begin)))

    def upload_small(self, name: str) -> None:
        """Upload a small file if it has changed."""
        path = self.folder / name
        try:
            state = path.stat()
        except FileNotFoundError:
            return
        version = state.st_mtime_ns, state.st_size
        if self._sent.get(name) != version:
            self._put(self.url / name, path.read_bytes())
            self._sent[name] = version

    def upload_rest(self, closed: bool) -> Iterator[Path]:
        """Upload the rest; yield each file of tensors before it is sent. rank.json is the last file.

        Files that are not finished keep the end of their name: their writer was killed.
        """
        for ring in (False, True):
            for unfinished in (False, True):
                for path in list(self.shards(ring, unfinished)):
                    yield path
                    self.upload_shard(path)
        self.upload_lines()
        self.upload_rows()
        self.upload_small(COVERAGE_JSON)
        self.upload_small(PROGRESS_JSON)
        if closed:
            self.upload_small(RANK_JSON)

    def _upload_segment(self, name: str, begin: int, data: bytes) -> None:
        if not data and name in self.ends:
            return
        self._put(self.url / segment_name(name, begin), data)  # an empty first one says that there are no lines
        self.ends[name] = begin + len(data)
        if self._frees:
            free_range(self.folder / name, begin, len(data))

    def _send(self, path: Path, url: Url) -> None:
        from fsspec.callbacks import Callback

        advanced = self._advanced

        class Sent(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                advanced(inc)

        fs, target = filesystem(url)
        with _errors(url):
            fs.put_file(str(path), target, callback=Sent())
        self._advanced(0)

    def _put(self, url: Url, data: bytes) -> None:
        fs, target = filesystem(url)
        with _errors(url):
            fs.pipe_file(target, data)
        self._advanced(len(data))


def claim_url(url: Url, rank: int, world: int, info: Mapping[str, Any], overwrite: bool) -> None:
    """Make `url` a run, or join the one that another rank began. Raise RunExists as for a folder."""
    files = RemoteFiles(url)
    names = files.names()
    found = _json(files, RUN_JSON)
    ranks = [name for name in names if RANK_NAME.fullmatch(name)]
    if names and RUN_JSON not in names and not ranks:
        raise RunExists(f"{url} is not empty and holds no tensortap run: choose another URL for the run.")
    if found and (found.get("version") != FORMAT or found.get("world") != world) and not overwrite:
        raise RunExists(
            f"{url} holds a run of {found.get('world')} ranks in format {found.get('version')}, this one has {world} "
            f"in format {FORMAT}: pass overwrite=True to replace it, or choose another URL."
        )
    own = rank_name(rank)
    if own in names and not overwrite:
        raise RunExists(f"{url / own} exists already: pass overwrite=True to replace it, or choose another URL.")
    for name in ranks if overwrite else ():
        if name == own or (rank == 0 and int(name.removeprefix("rank_")) >= world):
            clear_rank(files, url, name)
    # Only rank 0 replaces run.json, so that ranks which start at different moments leave one and the same.
    if not found or (overwrite and rank == 0):
        fs, target = filesystem(url / RUN_JSON)
        with _errors(url / RUN_JSON):
            fs.pipe_file(target, as_text(info).encode())


def upload_run_info(path: Path, url: Url) -> None:
    """Upload run.json, unless another rank has."""
    if not RemoteFiles(url).exists(RUN_JSON):
        fs, target = filesystem(url / RUN_JSON)
        with _errors(url / RUN_JSON):
            fs.pipe_file(target, path.read_bytes())


def is_same_recording(folder: Path, url: Url) -> bool:
    """Return whether the rank at a URL was begun by the process that wrote this folder, or is not there at all."""
    there, here = _json(RemoteFiles(url), RANK_JSON), _json(LocalFiles(folder), RANK_JSON)
    return not there or there.get("recording") == here.get("recording")


def clear_rank(files: RemoteFiles, url: Url, rank: str) -> None:
    """Delete the objects of a rank. Without rank.json and the index, the remaining objects do not look like a rank."""
    known = {RANK_JSON, COVERAGE_JSON, PROGRESS_JSON, INDEX, *_LINES}
    ours = [
        name
        for name in files.names(rank)
        if name in known or SEGMENT_NAME.fullmatch(name) or SHARD_NAME.fullmatch(name.removesuffix(PARTIAL))
    ]
    for name in sorted(ours, key=lambda name: (name != RANK_JSON, not name.startswith(INDEX))):
        fs, target = filesystem(url / rank / name)
        with _errors(url / rank / name):
            fs.rm_file(target)


def _json(files: Bytes, name: str) -> dict[str, Any]:
    try:
        value = read_json(files, name)
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def _errors(url: Url) -> Iterator[None]:
    """Turn the errors of a driver into one without secrets."""
    try:
        yield
    except TensortapError:
        raise
    except Exception as error:
        raise upload_error(error, url) from None

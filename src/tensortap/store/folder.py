"""The folder of a run: which one a writer may use, and which files it may delete. Only files of a run are deleted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensortap.errors import RunExists, scrub, shorten
from tensortap.store.format import (
    CALLS,
    COVERAGE_JSON,
    FORMAT,
    INDEX,
    LOOP,
    PARTIAL,
    PLACEMENTS,
    PROGRESS_JSON,
    RANK_FORMAT,
    RANK_JSON,
    RANK_NAME,
    RUN_FORMAT,
    RUN_JSON,
    SHARD_NAME,
    TEMPORARY_NAME,
    rank_name,
)
from tensortap.store.source import LocalFiles, read_json
from tensortap.store.writer.state import folder_error

__all__ = ["as_text", "claim", "discard", "overwrite_json", "write_json"]

_LEAST_TEXT = 16


def claim(path: Path, rank: int, world: int, info: Mapping[str, Any], overwrite: bool) -> Path:
    """Make `path` a run, or join the one that another rank began. Return the rank's own folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise RunExists(
            f"{error.filename} is a file, or a link to nothing: choose another path for the run."
        ) from error
    except OSError as error:
        raise folder_error(error, path) from error
    there = (path / RUN_JSON).exists()  # checked before it is read: another rank may write it in between
    found = _run_info(path)
    if found is None and not _is_ours(path):
        raise RunExists(f"{path} is not empty and holds no tensortap run: choose another path for the run.")
    if found is None and there and not overwrite:
        raise RunExists(f"{path / RUN_JSON} is damaged: pass overwrite=True to replace the run.")
    if found is not None and found.get("version") != FORMAT and not overwrite:
        raise RunExists(
            f"{path} holds a run of another format: pass overwrite=True to replace it, or choose another path."
        )
    if found is not None and found.get("world") != world and not overwrite:
        raise RunExists(
            f"{path} holds a run of {found.get('world')} ranks, this one has {world}: "
            "pass overwrite=True to replace it, or choose another path."
        )
    own = path / rank_name(rank)
    if (own.exists() or own.is_symlink()) and not overwrite:
        raise RunExists(f"{own} exists already: pass overwrite=True to replace it, or choose another path.")
    if overwrite:
        _make_room(path, own, rank, world)
    # Only rank 0 replaces run.json, so that ranks which start at different moments leave one and the same.
    if overwrite and rank == 0:
        write_json(path / RUN_JSON, info)
    elif found is None and not there:
        _create_once(path / RUN_JSON, info)
    try:
        own.mkdir(exist_ok=overwrite)
    except FileExistsError as error:  # the same rank, started twice
        raise RunExists(f"{own} exists already: each rank of a run is written once.") from error
    except OSError as error:
        raise folder_error(error, own) from error
    return own


def discard(path: Path, rank: int) -> None:
    """Delete one rank of a run, and the run with its last rank."""
    shutil.rmtree(path / rank_name(rank), ignore_errors=True)
    if path.is_dir() and {entry.name for entry in path.iterdir()} <= {RUN_JSON}:
        (path / RUN_JSON).unlink(missing_ok=True)
        with suppress(OSError):  # another rank has joined meanwhile
            path.rmdir()


def write_json(path: Path, value: Mapping[str, Any], reserve: int = 0) -> None:
    """Replace a file atomically: a reader sees the old or the new one. `reserve` is its least size in bytes."""
    temporary = _written_aside(path, value, reserve)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def overwrite_json(path: Path, value: Mapping[str, Any], shortened: str) -> None:
    """Write a file in place, within the size that it has: for a disk that is full.

    The text of the field `shortened` is cut until all of it fits.
    """
    descriptor = os.open(path, os.O_WRONLY)
    try:
        room = os.fstat(descriptor).st_size
        longest = len(str(value[shortened]))
        while len(text := as_text({**value, shortened: shorten(str(value[shortened]), longest)}).encode()) > room:
            if longest < _LEAST_TEXT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            longest //= 2
        os.pwrite(descriptor, text.ljust(room), 0)
    finally:
        os.close(descriptor)


def _create_once(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file unless it exists: the first of several ranks wins."""
    temporary = _written_aside(path, value)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links; ranks write the same there, so a lost race does no harm
        if not path.exists():
            shutil.copyfile(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _written_aside(path: Path, value: Mapping[str, Any], reserve: int = 0) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}{threading.get_native_id()}.tmp")
    text = as_text(value)
    try:
        temporary.write_text(text.ljust(reserve))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def as_text(value: Mapping[str, Any]) -> str:
    """Return a value as the text of a file, without credentials."""
    fields = (f"  {json.dumps(name)}: {_field_text(each)}" for name, each in value.items())
    return scrub("{\n" + ",\n".join(fields) + "\n}") + "\n"


def _field_text(value: Any) -> str:
    if isinstance(value, list) and value:  # indenting takes ten times as long, and there may be a row for each module
        return "[\n" + ",\n".join(f"    {_ENCODER.encode(each)}" for each in value) + "\n  ]"
    return json.dumps(value, indent=2, default=str).replace("\n", "\n  ")


_ENCODER = json.JSONEncoder(default=str)
"""Configuration holds all sorts of objects; their text is what a reader can use."""


def _run_info(path: Path) -> dict[str, Any] | None:
    return _of_format(path / RUN_JSON, RUN_FORMAT)


def _of_format(path: Path, name: str) -> dict[str, Any] | None:
    try:
        value = read_json(LocalFiles(), str(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) and value.get("format") == name else None


def _is_ours(path: Path) -> bool:
    """Return whether a folder without a valid run.json is a run, or empty except for files of starting ranks."""
    names = {entry.name for entry in path.iterdir() if not TEMPORARY_NAME.fullmatch(entry.name)}
    if not names or _run_info(path) is not None:
        return True
    ranks = [path / name for name in names if RANK_NAME.fullmatch(name)]
    return any(_of_format(rank / RANK_JSON, RANK_FORMAT) is not None for rank in ranks)


def _make_room(path: Path, own: Path, rank: int, world: int) -> None:
    _clear(own)
    if rank != 0:
        return
    for entry in list(path.iterdir()):
        match = RANK_NAME.fullmatch(entry.name)
        if match and int(match[1]) >= world:
            _clear(entry)
            try:
                entry.rmdir()
            except OSError as error:  # it holds files that tensortap did not write
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise


def _clear(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise RunExists(f"{folder} is not a folder of a run: nothing was deleted. Choose another path.")
    if not folder.exists():
        return
    names = [entry.name for entry in folder.iterdir() if _is_our_file(entry.name)]
    # rank.json first, the index next: a half-deleted rank must not look finished, nor refer to what is gone.
    for name in sorted(names, key=lambda name: (name != RANK_JSON, name != INDEX)):
        (folder / name).unlink()


def _is_our_file(name: str) -> bool:
    known = (RANK_JSON, COVERAGE_JSON, PROGRESS_JSON, CALLS, LOOP, PLACEMENTS, INDEX)
    if name in known or TEMPORARY_NAME.fullmatch(name):
        return True
    return bool(SHARD_NAME.fullmatch(name.removesuffix(PARTIAL))) or name.removesuffix(PARTIAL) in (CALLS, LOOP, INDEX)

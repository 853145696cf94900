"""Uploads a run that is on this disk: the spool that a broken network left, or a run that was recorded here."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tensortap.core.urls import Url, as_place
from tensortap.errors import RunExists, RunNotFound, RunUnreadable, UsageError
from tensortap.store.format import RANK_JSON, RANK_NAME, RUN_JSON, rank_name

__all__ = ["UPLOAD_JSON", "Uploaded", "delete_rank", "remove_spool", "upload"]

UPLOAD_JSON = "upload.json"
"""In a spool: the URL that it belongs to."""


class Uploaded(NamedTuple):
    """The uploaded ranks and bytes, and their URL."""

    url: Url
    ranks: list[int]
    nbytes: int


def upload(
    path: str | os.PathLike[str], url: str | Url | None = None, progress: Callable[[int], None] = lambda _: None
) -> list[Uploaded]:
    """Upload a spool, all spools in a folder, or a run on this disk, which needs a URL.

    A spool is removed when all of it is uploaded; another run stays. Data that is already uploaded is not sent again.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise RunNotFound(f"{folder} does not exist: there is nothing to upload.")
    if (folder / UPLOAD_JSON).exists():
        return [_upload_spool(folder, url, progress)]
    if (folder / RUN_JSON).exists():
        if url is None:
            raise UsageError(f"{folder} is a run, and not a spool: name the URL to upload it to.")
        return [_upload_run(folder, _target(url), progress)]
    spools = sorted(each for each in folder.iterdir() if (each / UPLOAD_JSON).exists())
    if not spools:
        raise RunUnreadable(f"{folder} is neither a spool nor a run: it has no {UPLOAD_JSON} and no {RUN_JSON}.")
    return [_upload_spool(each, url, progress) for each in spools]


def remove_spool(folder: Path, rank: int) -> None:
    """Delete the files of a spool that is uploaded."""
    shutil.rmtree(folder / rank_name(rank), ignore_errors=True)
    for name in (RUN_JSON, UPLOAD_JSON):
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):
        folder.rmdir()


def delete_rank(url: Url, rank: int) -> None:
    """Delete what a rank has uploaded."""
    from tensortap.store.remote import RemoteFiles
    from tensortap.store.writer.rank_upload import clear_rank

    clear_rank(RemoteFiles(url), url, rank_name(rank))


def _upload_spool(folder: Path, url: str | Url | None, progress: Callable[[int], None]) -> Uploaded:
    from tensortap.store.writer.rank_upload import is_same_recording

    about = _read(folder / UPLOAD_JSON)
    rank, known = about.get("rank"), about.get("url")
    if type(rank) is not int or not isinstance(known, str):
        raise RunUnreadable(f"{folder / UPLOAD_JSON} is damaged: it names no rank and no URL.")
    target = _target(known if url is None else url)
    own = folder / rank_name(rank)
    _check_ended(own)
    if not is_same_recording(own, target / rank_name(rank)):
        raise RunExists(
            f"{target / rank_name(rank)} holds another recording than {folder}: upload it elsewhere, with "
            f"`tensortap upload {folder} URL`."
        )
    nbytes = _send(folder, target, rank, True, progress)
    remove_spool(folder, rank)
    return Uploaded(target, [rank], nbytes)


def _upload_run(folder: Path, url: Url, progress: Callable[[int], None]) -> Uploaded:
    from tensortap.store.writer.rank_upload import is_same_recording

    ranks = sorted(int(m[1]) for each in folder.iterdir() if (m := RANK_NAME.fullmatch(each.name)))
    for rank in ranks:
        _check_ended(folder / rank_name(rank))
        if not is_same_recording(folder / rank_name(rank), url / rank_name(rank)):
            raise RunExists(f"{url} holds another run already: choose another URL.")
    return Uploaded(url, ranks, sum(_send(folder, url, rank, False, progress) for rank in ranks))


def _send(folder: Path, url: Url, rank: int, frees: bool, progress: Callable[[int], None]) -> int:
    from tensortap.store.writer.rank_upload import RankUpload, upload_run_info

    sent = 0

    def advanced(nbytes: int) -> None:
        nonlocal sent
        sent += nbytes
        progress(sent)

    upload_run_info(folder / RUN_JSON, url)
    one = RankUpload(folder / rank_name(rank), url, rank, frees, advanced)
    one.resume()
    for _ in one.upload_rest(closed=True):
        progress(sent)
    return sent


def _target(url: str | Url) -> Url:
    place = as_place(url)
    if not isinstance(place, Url):
        raise UsageError(f"{url} is not a URL: upload copies a run into an object store, such as s3://bucket/runs/a")
    return place


def _check_ended(folder: Path) -> None:
    """Raise UsageError if the process that writes a rank still runs on this machine."""
    about = _read(folder / RANK_JSON)
    pid = about.get("pid")
    if about.get("status") == "running" and about.get("host") == socket.gethostname() and type(pid) is int:
        with suppress(ProcessLookupError):
            with suppress(PermissionError):
                os.kill(pid, 0)
            raise UsageError(f"{folder} is still being written by process {pid}: wait until it has ended.")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunUnreadable(f"{path} cannot be read: {error}.") from error
    return value if isinstance(value, dict) else {}

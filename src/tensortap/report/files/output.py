"""The one place that opens an output: a file that appears when it is complete, or stdout for "-"."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from tensortap.core.urls import Url, as_place, filesystem, upload_error
from tensortap.errors import StoreWriteError, UsageError

__all__ = ["STDOUT", "check", "encoded", "opened"]

STDOUT = "-"


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for bytes. It gets its name when the block ends; if the block fails, nothing of it remains.

    >>> with opened("report.json") as file:
    ...     file.write(b"{}")
    """
    if str(path) == STDOUT:
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if isinstance(url := as_place(path), Url):
        with TemporaryFile() as file:
            yield file
            _upload(file, url)
        return
    with _named_errors(path):
        target = Path(path).resolve()  # a link stays a link
        if target.exists() and not target.is_file():  # a pipe or a device cannot be replaced by a rename
            with target.open("wb") as file:
                yield file
            return
        partial = target.with_name(f".{secrets.token_hex(6)}.partial")
        try:
            with partial.open("xb") as file:
                yield file
            partial.replace(target)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def check(path: str | Path) -> None:
    """Raise the error now that `opened` would raise after hours of work."""
    if str(path) == STDOUT:
        return
    if not str(path):
        raise UsageError("the path of a report is empty: name a file, such as report.html, or - for stdout")
    if isinstance(url := as_place(path), Url):
        filesystem(url)
        return
    with _named_errors(path):
        target = Path(path).resolve()
        if target.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if not target.parent.is_dir():
            raise FileNotFoundError(None, f"there is no folder {target.parent}")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise PermissionError(None, "no permission")


def encoded(parts: Iterable[str]) -> Iterator[bytes]:
    """Encode text as UTF-8; characters that cannot be encoded, as in a path of odd bytes, become escape sequences."""
    for part in parts:
        yield part.encode("utf-8", "backslashreplace")


def _upload(file: BinaryIO, url: Url) -> None:
    """Upload a complete file: an object appears with all of its content."""
    fs, target = filesystem(url)
    try:
        file.seek(0)
        fs.pipe_file(target, file.read())
    except Exception as error:
        raise upload_error(error, url) from None


@contextmanager
def _named_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has closed the pipe: the file itself is fine
    except OSError as error:
        raise StoreWriteError(f"{path} could not be written: {error.strerror or error}") from error

"""Where a report goes: a file that is there whole or not at all, or stdout for "-"."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tensortap.errors import StoreWriteError, UsageError

__all__ = ["STDOUT", "check", "encoded", "opened"]

STDOUT = "-"


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write bytes to. It takes its name when all is written; if that fails, nothing is left of it.

    >>> with opened("report.json") as file:
    ...     file.write(b"{}")
    """
    if str(path) == STDOUT:
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with _told(path):
        target = Path(path).resolve()  # a link stays a link
        if target.exists() and not target.is_file():  # a pipe or a device: nothing to be renamed
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
    """Fails now where `opened` would fail after hours of work."""
    if str(path) == STDOUT:
        return
    if not str(path):
        raise UsageError("a report needs a file to go to, like report.html; - is stdout")
    with _told(path):
        target = Path(path).resolve()
        if target.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if not target.parent.is_dir():
            raise FileNotFoundError(None, f"there is no folder {target.parent}")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise PermissionError(None, "no permission")


def encoded(parts: Iterable[str]) -> Iterator[bytes]:
    """Text as UTF-8; what cannot be encoded, such as a path of odd bytes, is spelled out."""
    for part in parts:
        yield part.encode("utf-8", "backslashreplace")


@contextmanager
def _told(path: str | Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read it has left: no error of the file's
    except OSError as error:
        raise StoreWriteError(f"{path} could not be written: {error.strerror or error}") from error

"""Files: a check before one is opened, and reads and writes at an offset by the fastest call that the platform has.

Linux and most Unixes have `preadv` and `pwrite`, older ones `pread`; Windows has neither. There, and with
TENSORTAP_PORTABLE=1, one lock for the process keeps seeking and transferring together.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tensortap.core.machine import PORTABLE
from tensortap.errors import RunUnreadable

__all__ = ["BINARY", "check_regular", "free_range", "read_at", "write_at"]

BINARY: int = getattr(os, "O_BINARY", 0)
"""Flag for `os.open`: Windows would translate line ends without it."""

_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_seeking = threading.Lock()
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_regular(path: Path, mode: int) -> None:
    """Raise RunUnreadable for a FIFO, a socket or a device; they may block, or never end."""
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "something else")
        raise RunUnreadable(f"{path} cannot be read: it is {kind}, not a file.")


def _read_by_preadv(descriptor: int, target: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [target], offset)


def _read_by_pread(descriptor: int, target: memoryview, offset: int) -> int:
    data = os.pread(descriptor, len(target), offset)
    target[: len(data)] = data
    return len(data)


def _read_by_seek(descriptor: int, target: memoryview, offset: int) -> int:
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(target))
    target[: len(data)] = data
    return len(data)


def _write_by_pwrite(descriptor: int, data: memoryview, offset: int) -> int:
    return os.pwrite(descriptor, data, offset)


def _write_by_seek(descriptor: int, data: memoryview, offset: int) -> int:
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def _chosen_read() -> Callable[[int, memoryview, int], int]:
    if PORTABLE or not hasattr(os, "pread"):
        return _read_by_seek
    return _read_by_preadv if hasattr(os, "preadv") else _read_by_pread


read_at = _chosen_read()
"""Fill the start of a buffer with bytes from an offset of a file; return how many, 0 at its end."""
write_at: Callable[[int, memoryview, int], int] = (
    _write_by_seek if PORTABLE or not hasattr(os, "pwrite") else _write_by_pwrite
)
"""Write a buffer at an offset of a file; return how many bytes were written."""


def free_range(path: Path, offset: int, nbytes: int) -> None:
    """Return the blocks of a range to the disk; it then reads as zeros. Do nothing where the system cannot."""
    if PORTABLE or sys.platform != "linux" or not nbytes:
        return
    try:
        allocate = ctypes.CDLL(None, use_errno=True).fallocate
        with path.open("r+b") as file:
            allocate(file.fileno(), _PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(nbytes))
    except (OSError, AttributeError):
        pass


def _renew_lock() -> None:
    """Give a forked child a free lock: another thread of its parent may have held the old one."""
    global _seeking
    _seeking = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)

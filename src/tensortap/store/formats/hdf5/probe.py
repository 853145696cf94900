"""Walk HDF5 files in another process before this one opens them.

The HDF5 library trusts what it reads: a damaged file can make it crash or never return, and neither can be caught in
this process. The walk takes a few tenths of a second, and its result is kept for files that do not change. Its limit is
CPU time, so that a sound file is not refused where many processes share a processor.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["find_damaged"]

_SECONDS = 10.0
"""CPU time for the walk of one file of usual size, and for starting the process."""
_BYTES_A_SECOND = 50e6
_WAIT = 12.0
"""Factor by which the walk may take longer where processes queue for a processor, or there are no limits."""
_LIMITS = """
import json, sys
sys.path[:], seconds = json.loads(sys.argv[1])
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.RLIM_INFINITY))
except (ImportError, OSError, ValueError):
    pass
"""
_WALK = """
import h5py

def walk(name, item):
    try:
        list(item.attrs.items())
    except Exception:
        pass  # the reader skips it
    if isinstance(item, h5py.Dataset):
        item.shape, item.dtype, item.id.get_storage_size(), item.id.get_offset()
        if item.chunks is not None:
            item.id.get_num_chunks()

for place, path in enumerate(sys.argv[2:]):
    try:
        with h5py.File(path, "r") as file:
            walk("/", file)
            file.visititems(walk)
    except Exception:
        pass  # the reader reports it
    print(place, flush=True)
"""
_known: dict[tuple[str, int, int], bool] = {}
_MOST_KNOWN = 4096


def find_damaged(paths: Sequence[Path]) -> list[Path]:
    """Return the files on which the HDF5 library crashes, or does not end in reasonable time."""
    if not sys.executable:  # an embedded interpreter cannot start another one
        return []
    states = {path: _state(path) for path in paths}
    unknown = [path for path in paths if states[path] not in _known]
    while unknown:
        walked = _walk(unknown)
        if len(_known) + len(unknown) > _MOST_KNOWN:
            _known.clear()
        for path in unknown[:walked]:
            _known[states[path]] = True
        for path in unknown[walked : walked + 1]:
            _known[states[path]] = False
        unknown = unknown[walked + 1 :]
    return [path for path in paths if not _known.get(states[path], True)]


def _walk(paths: Sequence[Path]) -> int:
    """Return the number of files, in order, that were walked before one stopped the process."""
    seconds = sum(_SECONDS + path.stat().st_size / _BYTES_A_SECOND for path in paths)
    given = json.dumps([sys.path, math.ceil(seconds)])
    command = [sys.executable, "-I", "-c", _LIMITS + _WALK, given, *(str(path.absolute()) for path in paths)]
    wait = seconds * _WAIT
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=wait, check=False)
        output, complete = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        output, complete = error.stdout or b"", False
    except OSError:  # no process can be started: the files are read without this check
        return len(paths)
    return len(paths) if complete else len(output.split())


def _state(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path.absolute()), status.st_size, status.st_mtime_ns

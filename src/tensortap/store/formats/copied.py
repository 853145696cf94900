"""Foreign files behind a URL: copied to this machine, and opened from there by the reader of their format.

Summaries of a foreign file need all of its bytes, so a copy reads nothing in vain. It is deleted with the run.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tensortap.core.urls import Url, filesystem, read_error
from tensortap.errors import RunNotFound, RunUnreadable, StoreWriteError, TensortapError
from tensortap.store.exports.manifest import MANIFEST
from tensortap.store.remote import traffic

if TYPE_CHECKING:
    from tensortap.store.run import Run

__all__ = ["open_copy"]

_TREES = {MANIFEST, "tensors", "grads"}
"""Names in a folder that is copied with everything in it: an export, or a tree of .npy files."""
_CHECKPOINT = re.compile(r"model\.safetensors(\.index\.json)?")
_OF_CHECKPOINT = re.compile(r".*\.(safetensors|json)")
_DUMP = re.compile(r".*\.(hdf5|h5)")
_MOST_FILES = 1_000_000


def open_copy(url: Url, open_local: Callable[[Path], Run]) -> Run:
    """Copy the file or folder at a URL, and open the copy. Refuse a folder of no known format: it may be a bucket."""
    folder = Path(tempfile.mkdtemp(prefix="tensortap-copy-"))
    try:
        local = _copied(url, folder)
        run = open_local(local)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(run.source, shutil.rmtree, folder, True)
    run.path = url
    return run


def _copied(url: Url, folder: Path) -> Path:
    fs, path = filesystem(url)
    try:
        is_file = fs.info(path).get("type") == "file"
        wanted = [(path, url.name)] if is_file else list(_wanted(fs, path, url))
    except TensortapError:
        raise
    except FileNotFoundError:
        raise RunNotFound(f"{url} does not exist: no run to open. Check the bucket and the name.") from None
    except Exception as error:
        raise read_error(error, url) from None
    for source, name in wanted:
        target = folder / (url.name or "run") / name if not is_file else folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            fs.get_file(source, str(target))
        except OSError as error:
            if error.errno is not None and error.filename is not None and str(folder) in str(error.filename):
                raise StoreWriteError(f"{url} could not be copied to {folder}: {error.strerror}.") from None
            raise read_error(error, url) from None
        except Exception as error:
            raise read_error(error, url) from None
        traffic.add(1, target.stat().st_size)
    return folder / (url.name or "run")


def _wanted(fs: object, path: str, url: Url) -> Iterator[tuple[str, str]]:
    """Yield the objects to copy, each with its name in the copy."""
    entries = {str(each["name"]).rstrip("/").rpartition("/")[2]: each for each in fs.ls(path, detail=True)}  # type: ignore[attr-defined]
    if _TREES & entries.keys():
        for number, source in enumerate(fs.find(path)):  # type: ignore[attr-defined]
            name = str(source).rstrip("/").removeprefix(path.rstrip("/")).lstrip("/")
            if ".." in name.split("/") or number > _MOST_FILES:
                raise RunUnreadable(f"{url} cannot be copied: {name!r} is not a name of a file, or there are too many.")
            yield str(source), name
        return
    pattern = _OF_CHECKPOINT if any(map(_CHECKPOINT.fullmatch, entries)) else _DUMP
    names = [name for name, each in entries.items() if pattern.fullmatch(name) and each.get("type") == "file"]
    if not names:
        shown = ", ".join(sorted(entries)[:8])
        raise RunUnreadable(f"{url} is not a run: it has no run.json. It holds {shown or 'nothing'}.")
    yield from ((str(entries[name]["name"]), name) for name in names)

"""What `tensortap export` wrote, opened as a run: a folder of .npy or .safetensors files, and the members of an .npz.

The manifest has the identity and the dtype of every tensor. Where it was lost, the names of .npy files and members say
most of it: `rank_0/step_000003/layers.0/micro_0.call_0.output.0`.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from tensortap.core.records import KINDS, Key, Location, display_name
from tensortap.errors import RunUnreadable
from tensortap.store.exports.manifest import ABOUT, EXPORT, MANIFEST, Listed, is_manifest, read_manifest
from tensortap.store.exports.plain import recorded
from tensortap.store.format import RUN_JSON
from tensortap.store.formats.checkpoint import safetensors_arrays
from tensortap.store.formats.entries import Array, EntriesRun, Entry, Loaded, Summarize, backward_or_forward
from tensortap.store.formats.npy.header import array_from, known_dtype, read_header

__all__ = ["export_info", "is_export", "key_of", "listed_entries", "named_entries", "open_export"]

_NAME = re.compile(
    r"rank_(?P<rank>[0-9]{1,9})/step_(?P<step>[0-9]{6,18})/(?P<module>[^/]+)/"
    rf"micro_(?P<micro>[0-9]{{1,18}})\.call_(?P<call>[0-9]{{1,18}})\.(?P<kind>{'|'.join(KINDS)})\.(?P<path>[^/]*)",
    re.DOTALL,
)
_FILES = "rank_*/step_*/*/micro_*.npy"
_PHASES = {"state": 0, "forward": 1, "backward": 2}
_LOST = "its manifest is missing: names come from the files, and bfloat16 and fp8 count as the float32 that they became"

_UNORDERED = "modules are in the order of their names: the order in which they ran is lost with the manifest"


def is_export(path: Path) -> bool:
    """Whether a folder is an export of .npy or .safetensors files."""
    if not path.is_dir() or (path / RUN_JSON).exists():
        return False
    return is_manifest(path / MANIFEST) or next(path.glob(_FILES), None) is not None


def open_export(path: Path, summarize: Summarize) -> EntriesRun:
    """Open the folder of an export. Tensors are read when asked for."""
    about = _about(path / ABOUT)
    if is_manifest(path / MANIFEST):
        entries = _listed_in_folder(path)
        return _run(path, entries, about, summarize, [])
    names = sorted(file.relative_to(path).as_posix().removesuffix(".npy") for file in path.glob(_FILES))
    entries, notices = named_entries(names, lambda name: _npy(path, f"{name}.npy"))
    return _run(path, entries, about, summarize, [*notices, _UNORDERED])


def listed_entries(rows: Iterable[Listed], load: Callable[[Listed], Loaded]) -> list[Entry]:
    """Entries from the rows of a manifest. `load` gives an array as it is stored."""
    ordered = sorted(rows, key=lambda row: (row.rank, row.seq))
    return [Entry(row.key, row.file or row.name, partial(_as_listed, row, load), row.rank, row.cls) for row in ordered]


def named_entries(names: Sequence[str], load: Callable[[str], Loaded]) -> tuple[list[Entry], list[str]]:
    """Entries from names alone, and what is to be said of that."""
    found = [(*where, name) for name in names if (where := key_of(name)) is not None]
    found.sort(key=lambda each: (each[0], each[1].step, each[1].micro, _PHASES[each[1].phase]))
    entries = [Entry(key, name, partial(_known, load, name), rank) for rank, key, name in found]
    return entries, [_LOST]


def key_of(name: str) -> tuple[int, Key] | None:
    """Rank and identity behind the name of a file or member, without its ending; None if it is no such name.

    >>> key_of("rank_0/step_000003/a%2Fb/micro_0.call_1.output.0")
    (0, Key(step=3, micro=0, phase='forward', module='a/b', call=1, kind='output', path='0'))
    """
    said = _NAME.fullmatch(name)
    if said is None:
        return None
    module, path, kind = unquote(said["module"]), unquote(said["path"]), said["kind"]
    module = "" if module == display_name("") else module
    numbers = {field: int(said[field]) for field in ("step", "micro", "call")}
    key = Key(phase=backward_or_forward(kind), module=module, kind=kind, path=path, **numbers)
    return int(said["rank"]), key


def export_info(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """What a run over an export knows of itself."""
    said = {name: str(about[name]) for name in ("framework", "model") if about.get(name)}
    return {"framework": "export", "model": path.name, "format": "export", "config": {}, **said}


def _run(
    path: Path, entries: Sequence[Entry], about: dict[str, Any], summarize: Summarize, notices: Sequence[str]
) -> EntriesRun:
    info = {**export_info(path, about), "world": len({entry.rank for entry in entries}) or 1}
    return EntriesRun(path, entries, info, summarize, notices=notices, complete=bool(about.get("complete", True)))


def _listed_in_folder(path: Path) -> list[Entry]:
    archives: dict[str, dict[str, Callable[[], Array]]] = {}

    def load(row: Listed) -> Loaded:
        if not row.file.endswith(".safetensors"):
            return _npy(path, row.file)
        if row.file not in archives:
            try:
                archives[row.file] = dict(safetensors_arrays(_inside(path, row.file)))
            except OSError as error:
                raise RunUnreadable(str(error.strerror or error)) from error
        if row.name not in archives[row.file]:
            raise RunUnreadable(f"there is no tensor {row.name[:80]!r} in it")
        array = archives[row.file][row.name]()
        pairs = row.dtype == "complex128" and array.dtype == np.float64 and array.shape[-1:] == (2,)
        return Loaded(array.view(np.complex128)[..., 0] if pairs else array)

    return listed_entries(read_manifest(path / MANIFEST), load)


def _as_listed(row: Listed, load: Callable[[Listed], Loaded]) -> Loaded:
    """The tensor of a row. Raise RunUnreadable if the file holds another one."""
    array, span = load(row)
    if array.shape != row.shape:
        raise RunUnreadable(f"it has shape {list(array.shape)}, but {list(row.shape)} in the manifest")
    try:
        tensor = recorded(array, row.dtype)
    except ValueError as error:
        raise RunUnreadable(str(error)) from error
    return Loaded(tensor, span if tensor is array else None)


def _known(load: Callable[[str], Loaded], name: str) -> Loaded:
    array, span = load(name)
    return Loaded(known_dtype(array), span)


def _npy(folder: Path, name: str) -> Loaded:
    """A .npy file, mapped."""
    path = _inside(folder, name)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            header = read_header(file, size)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise RunUnreadable(str(error.strerror or error)) from error
    span = Location(name, header.offset, header.nbytes) if header.is_plain else None
    return Loaded(array_from(memoryview(mapped)[header.offset :], header), span)


def _inside(folder: Path, name: str) -> Path:
    """A file of the folder. The manifest may come from anywhere: it must not name files elsewhere."""
    parts = name.split("/")
    if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise RunUnreadable(f"the manifest names {name[:80]!r}, which is no file of the export")
    return folder.joinpath(*parts)


def _about(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) and said.get("format") == EXPORT else {}

"""Exports, opened as a run: a folder of .npy or .safetensors files, and the members of an .npz.

The manifest has the identity and the dtype of every tensor. If it is lost, the names of .npy files and members hold
most of this: `rank_0/step_000003/layers.0/micro_0.call_0.output.0`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from tensortap.core.records import KINDS, Key, display_name
from tensortap.errors import RunUnreadable, shorten
from tensortap.store.exports.manifest import ABOUT, EXPORT, MANIFEST, ManifestRow, is_manifest, read_manifest
from tensortap.store.exports.plain import recorded
from tensortap.store.format import RUN_JSON
from tensortap.store.formats.entries import Array, LoadedTensor, StoredTensor, Summarize, TensorList, phase_of
from tensortap.store.formats.npy.file import load_npy
from tensortap.store.formats.npy.header import known_dtype
from tensortap.store.formats.safetensors import read_safetensors
from tensortap.store.source import Bytes, LocalFiles, read_json

__all__ = ["export_info", "key_of", "listed_tensors", "named_tensors", "open_source", "recognizes"]

_NAME = re.compile(
    r"rank_(?P<rank>[0-9]{1,9})/step_(?P<step>[0-9]{6,18})/(?P<module>[^/]+)/"
    rf"(?P<mode>micro|eval)_(?P<micro>[0-9]{{1,18}})\.call_(?P<call>[0-9]{{1,18}})\.(?P<kind>{'|'.join(KINDS)})\.(?P<path>[^/]*)",
    re.DOTALL,
)
_FILES = "rank_*/step_*/*/[em]*_*.call_*.npy"
_PHASES = {"eval": 0, "state": 1, "forward": 2, "backward": 3}
_LOST = "its manifest is missing: names come from the files, and bfloat16 and fp8 count as float32, as they are stored"

_UNORDERED = "modules are in the order of their names: the order in which they ran is lost with the manifest"


def recognizes(path: Path) -> bool:
    """Return whether a folder is an export of .npy or .safetensors files."""
    if not path.is_dir() or (path / RUN_JSON).exists():
        return False
    return is_manifest(path / MANIFEST) or next(path.glob(_FILES), None) is not None


def open_source(path: Path, summarize: Summarize) -> TensorList:
    """Open the folder of an export. Tensors are read when asked for."""
    files = LocalFiles(path)
    about = _about(files)
    notices: list[str] = []
    if is_manifest(path / MANIFEST):
        tensors = _listed_in_folder(path, files)
    else:
        names = sorted(file.relative_to(path).as_posix().removesuffix(".npy") for file in path.glob(_FILES))
        tensors, notices = named_tensors(names, lambda name: load_npy(files, f"{name}.npy"))
        notices.append(_UNORDERED)
    info = {**export_info(path, about), "world": len({tensor.rank for tensor in tensors}) or 1}
    complete = bool(about.get("complete", True))
    return TensorList(path, tensors, info, summarize, files=files, notices=notices, complete=complete)


def listed_tensors(rows: Iterable[ManifestRow], load: Callable[[ManifestRow], LoadedTensor]) -> list[StoredTensor]:
    """Return the tensors of a manifest. `load` returns an array as it is stored."""
    ordered = sorted(rows, key=lambda row: (row.rank, row.seq))
    return [
        StoredTensor(row.key, row.file or row.name, partial(_as_listed, row, load), row.rank, row.cls)
        for row in ordered
    ]


def named_tensors(names: Sequence[str], load: Callable[[str], LoadedTensor]) -> tuple[list[StoredTensor], list[str]]:
    """Return tensors identified by names alone, and notices about that."""
    found = [(*where, name) for name in names if (where := key_of(name)) is not None]
    found.sort(key=lambda each: (each[0], each[1].step, each[1].micro, _PHASES[each[1].phase]))
    entries = [StoredTensor(key, name, partial(_known, load, name), rank) for rank, key, name in found]
    return entries, [_LOST]


def key_of(name: str) -> tuple[int, Key] | None:
    """Return rank and identity from the name of a file or member without its ending; None if it is another name.

    >>> key_of("rank_0/step_000003/a%2Fb/micro_0.call_1.output.0")
    (0, Key(step=3, micro=0, phase='forward', module='a/b', call=1, kind='output', path='0'))
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    module, path, kind = unquote(match["module"]), unquote(match["path"]), match["kind"]
    module = "" if module == display_name("") else module
    numbers = {field: int(match[field]) for field in ("step", "micro", "call")}
    phase = "eval" if match["mode"] == "eval" else phase_of(kind)
    key = Key(phase=phase, module=module, kind=kind, path=path, **numbers)
    return int(match["rank"]), key


def export_info(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the info of a run over an export."""
    names = {name: str(about[name]) for name in ("framework", "model") if about.get(name)}
    return {"framework": "export", "model": path.name, "format": "export", "config": {}, **names}


def _listed_in_folder(path: Path, files: Bytes) -> list[StoredTensor]:
    archives: dict[str, dict[str, Callable[[], Array]]] = {}

    def load(row: ManifestRow) -> LoadedTensor:
        if not row.file.endswith(".safetensors"):
            return load_npy(files, row.file)
        if row.file not in archives:
            archives[row.file] = read_safetensors(files, row.file)
        if row.name not in archives[row.file]:
            raise RunUnreadable(f"{row.file} has no tensor {shorten(row.name)!r}")
        array = archives[row.file][row.name]()
        pairs = row.dtype == "complex128" and array.dtype == np.float64 and array.shape[-1:] == (2,)
        return LoadedTensor(array.view(np.complex128)[..., 0] if pairs else array)

    files.size(MANIFEST)  # refuses a link that leads out of the folder
    return listed_tensors(read_manifest(path / MANIFEST), load)


def _as_listed(row: ManifestRow, load: Callable[[ManifestRow], LoadedTensor]) -> LoadedTensor:
    """Return the tensor of a row. Raise RunUnreadable if the file holds another one."""
    array, location = load(row)
    if array.shape != row.shape:
        raise RunUnreadable(f"it has shape {list(array.shape)}, but {list(row.shape)} in the manifest")
    try:
        tensor = recorded(array, row.dtype)
    except ValueError as error:
        raise RunUnreadable(str(error)) from error
    return LoadedTensor(tensor, location if tensor is array else None)


def _known(load: Callable[[str], LoadedTensor], name: str) -> LoadedTensor:
    array, location = load(name)
    return LoadedTensor(known_dtype(array), location)


def _about(files: Bytes) -> dict[str, Any]:
    try:
        about = read_json(files, ABOUT)
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) and about.get("format") == EXPORT else {}

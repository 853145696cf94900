"""An .npz archive, opened as a run: an export, one call of a module, or a model's parameters by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tensortap.errors import RunNotFound, RunUnreadable
from tensortap.store.exports.manifest import EXPORT, MANIFEST, ManifestRow, is_manifest, read_manifest
from tensortap.store.formats.arrays import named_arrays
from tensortap.store.formats.entries import Array, Summarize, TensorList, few_notices
from tensortap.store.formats.exported import export_info, key_of, listed_tensors, named_tensors
from tensortap.store.formats.npy.header import known_dtype, readable_dtype
from tensortap.store.formats.npz.archive import NpzArchive, recognizes
from tensortap.store.formats.npz.module_call import is_module_call, open_module_call

__all__ = ["open_source", "recognizes"]


def open_source(path: Path, summarize: Summarize) -> TensorList:
    """Open an archive of arrays. Nothing is unpickled, and arrays are read when asked for."""
    if not path.exists():
        raise RunNotFound(f"{path} does not exist: no .npz archive to open.")
    archive = NpzArchive(path)
    if not archive.names:
        raise RunUnreadable(f"{path} holds no arrays.")
    manifest = path.with_name(f"{path.stem}.{MANIFEST}")
    rows = list(read_manifest(manifest)) if is_manifest(manifest) else []
    if any(row.name in archive for row in rows) or all(key_of(name) is not None for name in archive.names):
        return _export(path, archive, rows, summarize)
    if is_module_call(archive.names):
        return open_module_call(path, archive, summarize)
    return _parameters(path, archive, summarize)


def _export(path: Path, archive: NpzArchive, rows: list[ManifestRow], summarize: Summarize) -> TensorList:
    about = archive.about if archive.about.get("format") == EXPORT else {}
    if rows:
        tensors = listed_tensors(rows, lambda row: archive.load(row.name))
        listed = {row.name for row in rows}
        unlisted = [name for name in archive.names if name not in listed]
        notices = few_notices("arrays that the manifest does not list, and that are left out", unlisted)
    else:
        tensors, notices = named_tensors(archive.names, archive.load)
    info = {**export_info(path, about), "world": len({tensor.rank for tensor in tensors}) or 1}
    return TensorList(
        path, tensors, info, summarize, files=archive.files, notices=notices, complete=bool(about.get("complete", True))
    )


def _parameters(path: Path, archive: NpzArchive, summarize: Summarize) -> TensorList:
    """Arrays by name, as a state dict saved with numpy.savez has them."""
    reasons = {name: _find_problem(archive, name) for name in archive.names}
    readable = {name: partial(_array, archive, name) for name, reason in reasons.items() if not reason}
    unreadable = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    notices = few_notices("unreadable arrays", unreadable)
    if not readable:
        raise RunUnreadable(f"{path}: {notices[0]}.")
    info = {"framework": "npz", "model": path.name, "format": "npz", "config": {"kind": "named arrays"}, "world": 1}
    return named_arrays(path, readable, info, summarize, notices)


def _find_problem(archive: NpzArchive, name: str) -> str:
    """Return why an array cannot be read, according to its header; an empty text if it can."""
    try:
        readable_dtype(archive.header(name).dtype)
    except RunUnreadable as error:
        return str(error)
    return ""


def _array(archive: NpzArchive, name: str) -> Array:
    return known_dtype(archive.load(name).array)

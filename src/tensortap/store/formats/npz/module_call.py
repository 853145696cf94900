"""One call of one module in an .npz file, opened as a run of one step: its inputs, outputs and their gradients.

`tensortap.peek(save=...)` and the hooks of `compat.gradients` write it; so did scripts before them:

    gradients_and_inputs_down_blk2_b4.npz      input, output, grad_output, grad_input

`input_1` and `input_mask` are further inputs, by position or keyword. A member `dtypes` is a JSON text with the dtypes
that the tensors had, and the archive's comment names the module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tensortap.core import dtypes
from tensortap.core.records import Key
from tensortap.errors import RunUnreadable
from tensortap.store.exports.npz_file import CALL
from tensortap.store.exports.plain import recorded
from tensortap.store.formats.entries import LoadedTensor, StoredTensor, Summarize, TensorList, phase_of
from tensortap.store.formats.npy.header import known_dtype
from tensortap.store.formats.npz.archive import NpzArchive

__all__ = ["is_module_call", "open_module_call"]

_KINDS = ("input", "output", "grad_output", "grad_input")
"""In execution order."""
_DTYPES = "dtypes"
_NAME = re.compile(r"(?P<kind>(?:grad_)?(?:input|output))(?:_(?P<path>[^~]+))?(?P<again>~[0-9]+)?", re.DOTALL)
_FILE = re.compile(r"gradients_and_inputs_(?P<module>.+?)(?:\.rank[0-9]+)?(?:\.[0-9]+)?")
_MODULE = "module"
"""The module's name if the file does not have one."""


class _Member(NamedTuple):
    """The parsed name of a member."""

    name: str
    kind: str
    path: str


def is_module_call(names: Iterable[str]) -> bool:
    """Return whether these are the names of one call's tensors. The first of each kind has no path, so
    `input_proj.weight` alone is something else."""
    found = [_parsed(name) for name in names if name != _DTYPES]
    members = [each for each in found if each is not None]
    if not members or len(members) < len(found):
        return False
    sides = {each.kind.removeprefix("grad_") for each in members}
    return sides == {each.kind.removeprefix("grad_") for each in members if each.name.partition("~")[0] in _KINDS}


def open_module_call(path: Path, archive: NpzArchive, summarize: Summarize) -> TensorList:
    """Open a file of one call."""
    about = archive.about if archive.about.get("format") == CALL else {}
    module = str(about["module"]) if "module" in about else _module_of(path)
    paths = about["paths"] if isinstance(about.get("paths"), dict) else {}
    recorded_dtypes, notices = _dtypes(archive)
    members = [each for name in archive.names if (each := _parsed(name)) is not None]
    bits = _read_as_bits(archive, members, recorded_dtypes)
    if bits:
        notices.append(
            f"{', '.join(sorted(bits))}: uint16 is read as the bits of bfloat16, as paddle's numpy() gives it"
        )
    tensors = []
    for name, kind, path_there in sorted(members, key=lambda each: _KINDS.index(each.kind)):
        key = Key(0, 0, phase_of(kind), module, 0, kind, str(paths.get(name, path_there)))
        dtype = "bfloat16" if name in bits else recorded_dtypes.get(name)
        tensors.append(StoredTensor(key, name, partial(_loaded, archive, name, dtype), cls=str(about.get("class", ""))))
    info = {"framework": str(about.get("framework") or "npz"), "model": path.name, "format": "npz", "config": {}}
    return TensorList(
        path,
        tensors,
        {**info, "world": 1},
        summarize,
        files=archive.files,
        notices=notices,
        strict=True,
        only_module=module,
    )


def _parsed(name: str) -> _Member | None:
    match = _NAME.fullmatch(name)
    return None if match is None else _Member(name, match["kind"], (match["path"] or "0") + (match["again"] or ""))


def _module_of(path: Path) -> str:
    match = _FILE.fullmatch(path.name.removesuffix(path.suffix))
    return match["module"] if match is not None else _MODULE


def _dtypes(archive: NpzArchive) -> tuple[Mapping[str, str], list[str]]:
    """Return the recorded dtypes by member, and a notice if they cannot be read."""
    if _DTYPES not in archive:
        return {}, []
    try:
        found = json.loads(archive.text(_DTYPES))
        if not isinstance(found, dict) or not all(each in dtypes.NAMES for each in found.values()):
            raise ValueError("it does not list dtypes")
    except (RunUnreadable, ValueError, TypeError, RecursionError) as error:
        return {}, [f"its member {_DTYPES} cannot be read: {error}; tensors keep the dtypes of the file"]
    return found, []


def _read_as_bits(archive: NpzArchive, members: Iterable[_Member], known: Mapping[str, str]) -> set[str]:
    """Return members of uint16 that are bfloat16: a gradient is not an integer, so the other tensors are not either."""
    unsigned = [each for each in members if each.name not in known and _is_uint16(archive, each.name)]
    is_sure = any(each.kind.startswith("grad_") for each in unsigned)
    return {each.name for each in unsigned} if is_sure else set()


def _is_uint16(archive: NpzArchive, name: str) -> bool:
    try:
        return bool(archive.header(name).dtype.newbyteorder("=") == dtypes.numpy_dtype("uint16"))
    except RunUnreadable:
        return False  # reported when the index is built


def _loaded(archive: NpzArchive, name: str, dtype: str | None) -> LoadedTensor:
    array, location = archive.load(name)
    if dtype is None:
        return LoadedTensor(known_dtype(array), location)
    try:
        tensor = recorded(array, dtype)
    except ValueError as error:
        raise RunUnreadable(str(error)) from error
    return LoadedTensor(tensor, location if tensor is array else None)

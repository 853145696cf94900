"""File names in a tree of .npy files that a saving hook writes: formatting, parsing and order.

    PATH/tensors/rank_0/tensor_idx_0_layer_class_Linear_layer_name_fc1_micro_step_0.npy
    PATH/grads/rank_0/grad_idx_0_of_param_name_fc1.weight_micro_step_0.npy

`idx` counts files from 0, `micro_step` counts the model's forwards. A layer that returns several tensors has a file for
each. All but the first have the path in the output: `layer_name_lstm@1.0`. Characters that a file system or this scheme
does not allow are escaped as in URLs. In `grads`, names that begin with `tensor_idx` are read too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

__all__ = ["GRADS", "TENSORS", "NpyName", "file_name", "files_in", "grad_file", "parse", "rank_folders", "tensor_file"]

TENSORS = "tensors"
GRADS = "grads"

_FILE = re.compile(
    r"(?:tensor|grad)_idx_(?P<number>[0-9]+)_"
    r"(?:layer_class_(?P<cls>.+?)_layer_name_|of_param_name_)"
    r"(?P<name>.*?)(?:@(?P<path>[^@]*))?_micro_step_(?P<micro>-?[0-9]+)\.npy"
)
_RANK = re.compile(r"rank_(0|[1-9][0-9]{0,8})")
# Characters that Windows or POSIX forbid, or that have a meaning here. The root, whose name is empty, is "(root)".
_UNSAFE = re.compile(r'[%@/\\:*?"<>|()\x00-\x1f\x7f\ud800-\udfff]')
_ROOT = "(root)"
_LONGEST = 240  # bytes of a file name; most file systems end at 255


class NpyName(NamedTuple):
    """The parsed name of a file."""

    number: int
    cls: str
    """Class of the layer; empty for a gradient."""
    name: str
    """The layer or the parameter."""
    path: str
    """Path of the tensor in the layer's output."""
    micro: int


def tensor_file(index: int, cls: str, layer: str, path: str, micro: int) -> str:
    """
    >>> tensor_file(3, "Linear", "layers.0.fc1", "0", 1)
    'tensor_idx_3_layer_class_Linear_layer_name_layers.0.fc1_micro_step_1.npy'
    """
    where = "" if path == "0" else f"@{_escaped(path)}"
    before = f"tensor_idx_{index}_layer_class_{_escaped(cls)}_layer_name_"
    return file_name(before, layer, f"{where}_micro_step_{micro}.npy")


def grad_file(index: int, parameter: str, micro: int) -> str:
    return file_name(f"grad_idx_{index}_of_param_name_", parameter, f"_micro_step_{micro}.npy")


def parse(file: str) -> NpyName | None:
    """Return the parts of a name; None if a saving hook did not write it."""
    if (found := _FILE.fullmatch(file)) is None:
        return None
    name = "" if found["name"] == _ROOT else unquote(found["name"], errors="surrogatepass")
    path = unquote(found["path"], errors="surrogatepass") if found["path"] is not None else "0"
    return NpyName(int(found["number"]), unquote(found["cls"] or ""), name, path, int(found["micro"]))


def rank_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of the ranks, by number. Other folders, such as results of a comparison, are ignored."""
    if not folder.is_dir():
        return {}
    found = ((_RANK.fullmatch(entry.name), entry) for entry in folder.iterdir())
    return dict(sorted((int(match[1]), entry) for match, entry in found if match and entry.is_dir()))


def files_in(folder: Path) -> list[tuple[str, NpyName | None]]:
    """Return all .npy files of a rank in the order in which they were saved; those of other names last."""
    names = [entry.name for entry in folder.iterdir() if entry.suffix == ".npy" and not entry.name.startswith(".")]
    parsed = {name: parse(name) for name in sorted(names)}
    known = [name for name in parsed.values() if name is not None]
    # Where the counters start again with each micro step, the micro step comes first.
    again = len({name.number for name in known}) < len(known)

    def place(item: tuple[str, NpyName | None]) -> tuple[bool, int, int]:
        name = item[1]
        if name is None:
            return True, 0, 0
        return (False, name.micro, name.number) if again else (False, name.number, name.micro)

    return sorted(parsed.items(), key=place)


def file_name(before: str, name: str, after: str) -> str:
    """Return the name of a file that contains the name of a module or parameter, escaped and not too long.

    >>> file_name("b4.", "a/b", ".npz"), file_name("b4.", "", ".npz")
    ('b4.a%2Fb.npz', 'b4.(root).npz')
    """
    name = _escaped(name) if name else _ROOT
    room = _LONGEST - sum(len(part.encode(errors="surrogatepass")) for part in (before, after))
    if len(name.encode()) > room:  # not to be read back, but still its own
        mark = hashlib.sha256(name.encode()).hexdigest()[:16]
        name = f"{mark}~{name.encode()[-max(1, room - 17) :].decode(errors='ignore')}"
    return f"{before}{name}{after}"


def _escaped(name: str) -> str:
    return _UNSAFE.sub(lambda match: _encoded(match[0]), name)


def _encoded(characters: Iterable[str]) -> str:
    return "".join(
        quote(each.encode(errors="surrogatepass"), safe="") if ord(each) > 126 else f"%{ord(each):02X}"
        for each in characters
    )

"""Recognises and refuses pickles, since reading one can run any code. Finds the names in one without running it."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path

from tensortap.errors import RunUnreadable
from tensortap.store.source import read_head

__all__ = ["classes_in", "holds_pickle", "is_pickle", "is_torch_file", "refused"]

_ENDINGS = (".pkl", ".pickle")
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of torch files before they became zip archives: a pickle of a number."""
_PROTOCOLS = (2, 3, 4, 5)
_MOST_READ = 16 << 20
_MOST_NAMES = 10_000
_SHOWN = 3
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_HARMLESS = ("collections.", "_codecs.", "builtins.", "__builtin__.")
_OF_TENSORS = ("torch._", "torch.storage", *_HARMLESS)
_OF_ARRAYS = ("numpy.", *_HARMLESS)


def is_pickle(path: Path) -> bool:
    """Return whether a file is a pickle, by its ending or by its content. A file of torch holds one."""
    if not path.is_file():
        return path.suffix in _ENDINGS and not path.is_dir()
    return path.suffix in _ENDINGS or holds_pickle(path)


def holds_pickle(path: Path) -> bool:
    """Return whether a file is a pickle by its content, regardless of its ending. A file of torch holds one."""
    return _begins(read_head(path, 9)) or is_torch_file(path)


def is_torch_file(path: Path) -> bool:
    """Return whether `torch.save` wrote a file, in its present or its former format."""
    if (head := read_head(path, len(_LEGACY))) == _LEGACY:
        return True
    return head[:2] == b"PK" and any(name.endswith("/data.pkl") for name in _members(path))


def refused(path: Path, reason: str = "") -> RunUnreadable:
    """Return the error for a pickle that is not read. `reason` is why its tensors could not be read alone."""
    names = list(dict.fromkeys(islice(_names(path), _MOST_NAMES)))
    advice = 'Save model.state_dict(), not the model: torch.save(model.state_dict(), "weights.pt")'
    if any(name.endswith("/constants.pkl") for name in _members(path)):
        what = "a TorchScript program"
        advice = 'Save its state dict: torch.save(torch.jit.load(path).state_dict(), "weights.pt")'
    elif names and all(name.startswith(_OF_ARRAYS) for name in names):
        what, advice = "a pickle of NumPy arrays", 'Save them with numpy.savez("arrays.npz", **arrays)'
    else:
        what = _what(path, classes_in(path), reason)
    return RunUnreadable(f"{path} is {what}. Reading it can run any code, so it is not read. {advice}.")


def classes_in(path: Path) -> list[str]:
    """Return the classes and functions that a pickle would load, except those that tensors need."""
    names = dict.fromkeys(islice(_names(path), _MOST_NAMES))
    return [name for name in names if not name.startswith(_OF_TENSORS) and not _is_of_tensors(name)]


def _what(path: Path, classes: list[str], reason: str) -> str:
    kind = "a file of torch.save that holds more than tensors" if is_torch_file(path) else "a pickle"
    if classes:
        more = f" and {len(classes) - _SHOWN} more" if len(classes) > _SHOWN else ""
        return f"{kind}: it would load {', '.join(name[:80] for name in classes[:_SHOWN])}{more}"
    return f"{kind}: it cannot be read as a state dict of tensors alone ({reason})" if reason else kind


def _begins(head: bytes) -> bool:
    """Return whether a pickle begins so. The length of a safetensors header may begin with the same two bytes."""
    return len(head) >= 2 and head[0] == 0x80 and head[1] in _PROTOCOLS and head[4:9] != b"\0\0\0\0{"


def _members(path: Path) -> list[str]:
    try:
        if not zipfile.is_zipfile(path):
            return []
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return []


def _bytes(path: Path) -> bytes:
    """Return the instructions of a pickle, up to a limit."""
    data = read_head(path, _MOST_READ)
    member = next((name for name in _members(path) if name.endswith("/data.pkl")), None)
    if member is None:
        return data
    with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
        return stream.read(_MOST_READ)


def _names(path: Path) -> Iterator[str]:
    """Yield the classes and functions that the pickles in a file name, until one cannot be parsed."""
    try:
        data = memoryview(_bytes(path))
        while data:
            used = yield from _names_in(bytes(data))
            data = data[used:]
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError, NotImplementedError, RuntimeError):
        return


def _names_in(data: bytes) -> Generator[str, None, int]:
    """Yield the names in one pickle; return its length."""
    texts: list[str] = []
    memo: dict[int, str] = {}
    last, stored, end = "", 0, 0
    for instruction, given, place in pickletools.genops(data):
        name, argument, end = instruction.name, str(given), (place or 0) + 1
        if name == "GLOBAL":
            yield argument.replace(" ", ".")
        elif name == "STACK_GLOBAL" and len(texts) >= 2:
            yield ".".join(texts[-2:])
        elif name in _TEXTS:
            last = argument
            texts = [*texts[-1:], last]
        elif name in ("BINGET", "LONG_BINGET", "GET") and int(argument) in memo:
            texts = [*texts[-1:], memo[int(argument)]]
        elif name == "MEMOIZE":
            memo[stored] = last
            stored += 1
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[int(argument)] = last
    return end


def _is_of_tensors(name: str) -> bool:
    module, _, own = name.rpartition(".")
    return module == "torch" and (own.endswith("Storage") or own in ("Size", "device", "Tensor") or own[:1].islower())

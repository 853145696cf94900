"""Read a dump under the names that scripts use, with any number of digits in a group's number.

    with open_dump("0-epoch_3-step_dump.hdf5") as f:
        f["018_BatchNorm2d/grad_input0"][:]         # also if the file calls the group 0018_BatchNorm2d

The original dumper writes four digits, but its documentation shows three.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import h5py

from tensortap.compat.dump_file import format_none
from tensortap.core.records import display_name
from tensortap.errors import RunNotFound, RunUnreadable
from tensortap.report.wording import clean

__all__ = ["DatasetInfo", "DumpContents", "OpenDump", "open_dump", "print_contents"]

_GROUP = re.compile(r"/?([0-9]+)_(.*)", re.DOTALL)
_MOST_DIGITS = 9
_KINDS = ("feat_input", "feat_output", "grad_output", "grad_input")


class DatasetInfo(NamedTuple):
    """Dtype and shape of a dataset."""

    dtype: str
    """The tensor's dtype; bfloat16 is stored as float32."""
    shape: tuple[int, ...]


class DumpContents(dict[str, Any]):
    """The datasets of each group: `contents["0018_BatchNorm2d"]["grad_input0"]` is a `DatasetInfo`.

    Lookup accepts any number of digits, and paths as h5py does: `contents["018_BatchNorm2d/grad_input0"]`.
    """

    def __missing__(self, key: str) -> Any:
        group, _, dataset = key.strip("/").partition("/")
        for name in (group, *_other_digits(group)):
            if dict.__contains__(self, name):
                found = dict.__getitem__(self, name)
                return found[dataset] if dataset else found
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]
        except (KeyError, AttributeError):
            return False
        return True

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default


def print_contents(path: Path, file: Any) -> DumpContents:
    """Print the groups and datasets of an open file, and return them."""
    found = DumpContents()
    print(path)
    for name, group in file.items():
        if not isinstance(group, h5py.Group):
            continue
        module = group.attrs.get("module")
        print(
            clean(
                f"{name}" + (f"  {display_name(module)} · {group.attrs.get('phase', '')}" if module is not None else "")
            )
        )
        found[name] = {}
        for inner in sorted(group, key=_kind_and_number):
            if isinstance(dataset := group[inner], h5py.Dataset):
                dtype, shape = str(dataset.attrs.get("dtype", dataset.dtype)), tuple(dataset.shape or ())
                found[name][inner] = DatasetInfo(dtype, shape)
                empty, same_as = dataset.attrs.get("none", False), str(dataset.attrs.get("same_as", ""))
                inside = str(dataset.attrs.get("path", ""))
                value = format_none(same_as) if empty else f"{dtype} {list(shape)}"
                # The path says more than the dataset's name if the argument has a keyword, or is nested.
                print(clean(f"    {inner}  {value}" + (f"  {inside}" if inside and not inside.isdigit() else "")))
    return found


def _kind_and_number(name: str) -> tuple[int, str, int, str]:
    """Sort datasets as the documentation lists them: backward groups have theirs in the order of arrival."""
    kind = name.rstrip("0123456789")
    number = name[len(kind) :]
    rank = _KINDS.index(kind) if kind in _KINDS else len(_KINDS)
    return rank, kind, int(number) if len(number) <= _MOST_DIGITS and number else -1, name


def open_dump(path: str | os.PathLike[str]) -> OpenDump:
    """Open a dump for reading, as an `h5py.File` that finds groups with any number of digits.

    Datasets also have `value`, which h5py removed in version 3.

    >>> with open_dump("dumps/0-epoch_3-step_dump.hdf5") as f:                         # doctest: +SKIP
    ...     print(f["018_BatchNorm2d/grad_input0"][:])
    """
    if not Path(path).exists():
        raise RunNotFound(f"{path} does not exist: there is no dump to open. Check the path, epoch and step.")
    try:
        return OpenDump(path, "r")
    except OSError as error:
        raise RunUnreadable(f"{path} cannot be read as HDF5, so it is damaged or not a dump: {error}") from error


class _AnyDigits:
    """Lookup with any number of digits, as a mixin before a class of h5py."""

    def __getitem__(self, name: Any) -> Any:
        known: Any = super()
        found = known.__getitem__(self._stored(name))
        if isinstance(found, h5py.Dataset):
            return _DumpDataset(found.id)
        return _DumpGroup(found.id) if isinstance(found, h5py.Group) else found

    def __contains__(self, name: Any) -> bool:
        known: Any = super()
        return bool(known.__contains__(self._stored(name)))

    def get(self, name: Any, *args: Any, **options: Any) -> Any:
        known: Any = super()
        return known.get(self._stored(name), *args, **options)

    def _stored(self, name: Any) -> Any:
        """Return the name as it is in the file; unchanged if the file has none of its spellings."""
        known: Any = super()
        return next((each for each in _spellings(name) if known.__contains__(each)), name)


class OpenDump(_AnyDigits, h5py.File):  # type: ignore[misc]
    """An open dump, as `open_dump` returns it."""


class _DumpGroup(_AnyDigits, h5py.Group):  # type: ignore[misc]
    """A group of a dump."""


class _DumpDataset(h5py.Dataset):  # type: ignore[misc]
    """A dataset of a dump."""

    @property
    def value(self) -> Any:
        """All values."""
        return self[()]


def _spellings(name: Any) -> Iterable[str]:
    """Return a path as given, then with other numbers of digits in its first part."""
    if not isinstance(name, str):
        return ()
    group, slash, rest = name.lstrip("/").partition("/")
    return (name, *(f"{other}{slash}{rest}" for other in _other_digits(group)))


def _other_digits(group: str) -> list[str]:
    """Return a group's name with all other numbers of digits."""
    if (found := _GROUP.fullmatch(group)) is None:
        return []
    number = int(found[1]) if len(found[1]) <= _MOST_DIGITS else -1
    names = dict.fromkeys(f"{number:0{digits}d}_{found[2]}" for digits in range(1, _MOST_DIGITS + 1))
    return [name for name in names if name != group and number >= 0]

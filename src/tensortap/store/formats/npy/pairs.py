"""Pairs the files of two .npy trees."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tensortap.store.formats.npy.names import GRADS, TENSORS, NpyName, files_in, rank_folders

__all__ = ["BY_NAME", "BY_ORDER", "Adopted", "Pairing", "adopt", "pair_files"]

BY_NAME, BY_ORDER = "paired by name", "paired by order"

Files = Sequence[tuple[str, NpyName | None]]
Pairs = list[tuple[str, str]]
_COUNTER = re.compile(r"_[0-9]+(?=[._@]|$)")


class Pairing(NamedTuple):
    """The files of two folders."""

    pairs: Pairs
    """In the order of the first folder."""
    rule: str
    """The rule that paired files whose names differ."""
    only_first: list[str]
    only_second: list[str]


def pair_files(first: Path, second: Path) -> Pairing:
    """Pair the files of two rank folders.

    Paddle numbers its layers over the whole process, so two models of one process share no file name. If the folders
    have no name in common, files are paired that have the same index, and the same name except for such numbers.
    """
    a, b = files_in(first), files_in(second)
    pairs, rule = _by_name(a, b), BY_NAME
    if not {file for file, _ in a} & {file for file, _ in b}:
        # Only if that finds more: a layer `conv_1` whose neighbour is missing is not the layer `conv_2`.
        by_order = _by_order(a, b)
        if len(by_order) > len(pairs):
            pairs, rule = by_order, BY_ORDER
    ours, theirs = {one for one, _ in pairs}, {other for _, other in pairs}
    return Pairing(
        pairs,
        rule,
        [file for file, _ in a if file not in ours],
        [file for file, _ in b if file not in theirs],
    )


class Adopted(NamedTuple):
    """Names and calls that files of the second tree have in the first one, where they differ."""

    names: dict[str, str]
    """Names of layers and parameters."""
    calls: dict[tuple[int, str], int]
    """Number of earlier calls of the layer in the micro step, by rank and file as in `tensors/….npy`."""


def adopt(first: Path, second: Path) -> Adopted:
    """Find the names that the files of the second tree have in the first one, according to `pair_files`."""
    names: dict[str, str] = {}
    calls: dict[tuple[int, str], int] = {}
    for kind in (TENSORS, GRADS):
        ours, theirs = rank_folders(first / kind), rank_folders(second / kind)
        for rank in ours.keys() & theirs.keys():
            pairing = pair_files(ours[rank], theirs[rank])
            a, b = files_in(ours[rank]), files_in(theirs[rank])
            if pairing.rule == BY_ORDER:
                names_a, names_b = ({file: name.name for file, name in files if name} for files in (a, b))
                for one, other in pairing.pairs:
                    if names.setdefault(names_b[other], names_a[one]) != names_a[one]:
                        return Adopted({}, {})  # one name would stand for two
            else:
                calls |= {(rank, f"{kind}/{file}"): call for file, call in _other_calls(a, b, pairing.pairs).items()}
    return Adopted(names if len(set(names.values())) == len(names) else {}, calls)


def _other_calls(a: Files, b: Files, pairs: Pairs) -> dict[str, int]:
    """Return the first side's calls, for files of the second side that are paired with a call of another number.

    Files without a partner come after all others of their layer.
    """
    calls_a, calls_b = _calls(a), _calls(b)
    number = {file: at for files in calls_a.values() for at, file in enumerate(files)}
    partner = {theirs: ours for ours, theirs in pairs}
    found: dict[str, int] = {}
    for call, files in calls_b.items():
        if all(number.get(partner.get(file, ""), at) == at for at, file in enumerate(files)):
            continue
        alone = len(files) + len(calls_a.get(call, ()))
        for at, file in enumerate(files):
            found[file] = number[partner[file]] if partner.get(file) in number else alone + at
    return found


def _by_name(a: Files, b: Files) -> Pairs:
    """Pair equal names, and the n-th files of one layer, place and micro step.

    The index in a name counts all files of the run. A call that only one side made, such as that of
    an expert, moves the index of all files that follow.
    """
    in_b = {file for file, _ in b}
    found = {file: file for file, _ in a if file in in_b}
    calls_b = _calls(b)
    for call, ours in _calls(a).items():
        theirs = calls_b.get(call, [])
        if len(ours) == len(theirs):  # behind a gap, equal names of a layer that is called repeatedly are chance
            found.update(zip(ours, theirs, strict=True))
            continue
        same = {*ours} & {*theirs}
        found.update((x, y) for x, y in zip(ours, theirs, strict=False) if x not in same and y not in same)
    return [(file, found[file]) for file, _ in a if file in found]


def _calls(files: Files) -> dict[NpyName, list[str]]:
    """Return the files by all parts of their names except the index."""
    found: dict[NpyName, list[str]] = defaultdict(list)
    for file, name in files:
        if name is not None:
            found[name._replace(number=0)].append(file)
    return found


def _by_order(a: Files, b: Files) -> Pairs:
    waiting = {_without_counters(name): file for file, name in b if name is not None}
    return [(file, waiting[key]) for file, name in a if name and (key := _without_counters(name)) in waiting]


def _without_counters(name: NpyName) -> NpyName:
    return name._replace(name=_COUNTER.sub("_#", name.name))

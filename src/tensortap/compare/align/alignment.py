"""Pair the records of two runs by identity, after renames; and list the records that only one side has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Names, Side
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.store import Run

__all__ = ["Alignment", "Renames", "align", "one_module_each", "suggest"]

Ints = npt.NDArray[np.int64]
_MOST_RULES = 8


@dataclass(frozen=True)
class Renames:
    """Renames of the candidate's modules: regular expressions, applied in order, and exact names, which go first."""

    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()
    exact: Mapping[str, str] | None = None

    @classmethod
    def of(cls, rules: Sequence[str], exact: Mapping[str, str] | None = None) -> Renames:
        """Read 'PATTERN=REPLACEMENT' texts. Raise UsageError if one is not valid."""
        patterns = []
        for rule in rules:
            pattern, equals, replacement = rule.rpartition("=")  # a pattern may have one, as in (?=...)
            if not equals:
                raise UsageError(f"rename {rule!r} has no '=': write 'PATTERN=REPLACEMENT', like '^model\\.='")
            try:
                patterns.append((re.compile(pattern), replacement))
            except (re.error, OverflowError, RecursionError) as error:
                raise UsageError(f"rename {rule!r}: {pattern!r} is not a regular expression: {error}") from error
            _check_template(rule, patterns[-1][0], replacement)
        if exact is not None:
            exact = {_plain(old): _plain(new) for old, new in exact.items()}
        return cls(tuple(patterns), exact)

    def __bool__(self) -> bool:
        return bool(self.patterns or self.exact)

    def __call__(self, name: str) -> str:
        if self.exact and name in self.exact:
            return self.exact[name]
        for pattern, replacement in self.patterns:
            name = pattern.sub(replacement, name)
        return name


def one_module_each(reference: Run, candidate: Run) -> Renames:
    """Return renames for two files of a single module each, which are paired whatever their names."""
    ours, theirs = reference.only_module, candidate.only_module
    return Renames() if ours is None or theirs is None or ours == theirs else Renames(exact={theirs: ours})


def _check_template(rule: str, pattern: re.Pattern[str], replacement: str) -> None:
    """Raise UsageError if the replacement is not valid, before it is first applied."""
    try:
        re.compile(f"{pattern.pattern}|", pattern.flags).sub(replacement, "")  # matches, with every group empty
    except (re.error, IndexError) as error:
        raise UsageError(
            f"rename {rule!r}: {replacement!r} is not a replacement for {pattern.pattern!r}: {error}"
        ) from error


def _plain(name: str) -> str:
    """Return the name of a module; "(root)" is the root, whose name is empty."""
    return "" if name == display_name("") else name


@dataclass(frozen=True)
class Alignment:
    """Rows of both sides of every pair, in the reference's order, and rows that only one side has."""

    reference: Ints
    candidate: Ints
    only_reference: Ints
    only_candidate: Ints

    def of_reference(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a column of the reference by pair. It is read-only: if all rows are paired in order, nothing is
        copied."""
        return _taken(column, self.reference, self.is_consecutive[0])

    def of_candidate(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a column of the candidate by pair, read-only."""
        return _taken(column, self.candidate, self.is_consecutive[1])

    @cached_property
    def is_consecutive(self) -> tuple[bool, bool]:
        """Whether the rows of each side are 0, 1, 2, ..."""
        count = np.arange(len(self.reference))
        return np.array_equal(self.reference, count), np.array_equal(self.candidate, count)


def _taken(column: npt.NDArray[Any], rows: Ints, consecutive: bool) -> npt.NDArray[Any]:
    # Many columns consist of zeros, of which the index holds one for all.
    same = consecutive or (len(rows) <= len(column) and column.dtype.kind in "iu" and not column.any())
    found = column[: len(rows)] if same else column[rows]
    found.flags.writeable = False
    return found


def align(
    reference: Side,
    candidate: Side,
    rename: Callable[[str], str] | None = None,
    steps: Mapping[int, int] | None = None,
    ranks: Mapping[int, int] | None = None,
) -> Alignment:
    """Pair records of one identity and rank. `steps` and `ranks` map the reference's numbers to the candidate's."""
    modules = candidate.module if rename is None else candidate.module.renamed(rename)
    pairs: list[tuple[Ints, Ints]] = [
        (reference.rank, _shifted(candidate.rank, ranks)),
        (reference.step, _shifted(candidate.step, steps)),
        (reference.micro, candidate.micro),
        (reference.call, candidate.call),
        *(_shared(getattr(reference, name), getattr(candidate, name)) for name in ("phase", "kind", "path")),
        _shared(reference.module, modules),
    ]
    left, right = _joined(pairs)
    # An identity should be unique. If it is not, pair the first with the first, the second with the second.
    left, right = _joined([(left, right), (_occurrences(left), _occurrences(right))])
    order = np.argsort(right, kind="stable")
    spot = np.searchsorted(right[order], left)
    inside = np.minimum(spot, max(0, len(order) - 1))
    found = (right[order[inside]] == left) if len(order) else np.zeros(len(left), bool)
    rows = np.flatnonzero(found)
    partners = order[inside[rows]] if len(order) else np.empty(0, np.int64)
    taken = np.zeros(len(right), bool)
    taken[partners] = True
    return Alignment(rows, partners, np.flatnonzero(~found), np.flatnonzero(~taken))


def _shifted(numbers: Ints, mapping: Mapping[int, int] | None) -> Ints:
    if mapping is None:
        return numbers
    back = {theirs: ours for ours, theirs in mapping.items()}
    if len(back) < len(mapping):
        twice = next(theirs for ours, theirs in mapping.items() if back[theirs] != ours)
        raise UsageError(f"{twice} of the candidate is to be compared with several of the reference: give one of them")
    values, inverse = np.unique(numbers, return_inverse=True)
    return np.array([back.get(int(value), -1 - int(value)) for value in values], np.int64)[inverse]


def _occurrences(identity: Ints) -> Ints:
    """Count for each row the rows before it with the same identity."""
    order = np.argsort(identity, kind="stable")
    ordered = identity[order]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    found = np.empty(len(identity), np.int64)
    found[order] = np.arange(len(identity)) - np.repeat(first, np.diff(first, append=len(identity)))
    return found


def _shared(left: Names, right: Names) -> tuple[Ints, Ints]:
    """Return codes that mean the same word on both sides."""
    words = {word: code for code, word in enumerate(dict.fromkeys([*left.words, *right.words]))}
    return (
        np.array([words[w] for w in left.words], np.int64)[left.codes] if left.words else left.codes,
        np.array([words[w] for w in right.words], np.int64)[right.codes] if right.words else right.codes,
    )


def _joined(pairs: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Combine several columns into one number a row. Numbers are made dense before they would exceed 64 bits."""
    split = len(pairs[0][0])
    whole, size = np.zeros(split + len(pairs[0][1]), np.int64), 1
    for left, right in pairs:
        column = np.concatenate([left, right])
        column = column - column.min(initial=0)
        width = int(column.max(initial=0)) + 1
        if size * width >= 1 << 62:
            values, whole = np.unique(whole, return_inverse=True)
            size = len(values)
            if size * width >= 1 << 62:
                column = np.unique(column, return_inverse=True)[1]
                width = int(column.max(initial=0)) + 1
        whole = whole * width + column
        size *= width
    return whole[:split], whole[split:]


def suggest(reference: Side, candidate: Side) -> list[str]:
    """Suggest renames, ready for --rename, that make the candidate's names match the reference's: another prefix, or
    other words for modules that run in the same order with the same shapes."""
    ours, theirs = set(reference.module.words) - {""}, set(candidate.module.words) - {""}
    best, most = [], len(ours & theirs)
    for rules in (_by_prefix(ours, theirs), *_by_order(reference, candidate)):
        matched = len(ours & set(map(Renames.of(rules), theirs)))
        if matched > most:
            best, most = rules, matched
    return best


def _by_prefix(ours: set[str], theirs: set[str]) -> list[str]:
    """Suggest one prefix instead of another; either may be empty."""
    prefixes: Counter[tuple[str, str]] = Counter()
    by_tail: dict[str, list[str]] = {}
    for name in ours:
        for head, tail in _cuts(name):
            by_tail.setdefault(tail, []).append(head)
    for name in theirs - ours:
        for head, tail in _cuts(name):
            prefixes.update((head, other) for other in by_tail.get(tail, ()) if other != head)
    if not prefixes:
        return []
    (old, new), times = min(prefixes.items(), key=lambda item: (-item[1], len(item[0][0]) + len(item[0][1]), item[0]))
    if times * 2 < len(theirs - ours):
        return []
    found = f"^{re.escape(old)}\\." if old else "^(?=.)"  # the root has no name, and gets none
    return [f"{found}={new}." if new else f"{found}="]


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Yield a name's possible prefixes, with the rest of it."""
    parts = name.split(".")
    for cut in range(min(3, len(parts))):
        yield ".".join(parts[:cut]), ".".join(parts[cut:])


def _by_order(reference: Side, candidate: Side) -> Iterator[list[str]]:
    """Suggest renames for modules that run in the same order with the same output shapes: by the words that differ,
    and, if those are ambiguous, by whole names."""
    ours, theirs = _outline(reference), _outline(candidate)
    if [shape for _, shape in ours] != [shape for _, shape in theirs]:
        return
    renamed = {old: new for (new, _), (old, _) in zip(ours, theirs, strict=True) if old != new and old and new}
    words = Counter(words for old, new in renamed.items() for words in _other_words(old, new))
    # Longer ones first: after a shorter one was replaced, the rest of a name no longer matches.
    chosen = sorted((two for two, _ in words.most_common(_MOST_RULES)), key=lambda two: -len(two[0]))
    yield [f"\\b{re.escape(old)}\\b={new}" for old, new in chosen]
    whole = list(dict.fromkeys(_numbered(old, new) for old, new in renamed.items()))
    if len(whole) <= 2 * _MOST_RULES:
        yield whole


def _outline(side: Side) -> list[tuple[str, tuple[int, ...]]]:
    seen: dict[str, tuple[int, ...]] = {}
    for row in range(min(len(side), 20_000)):
        if side.kind[row] in ("output", "param"):
            seen.setdefault(side.module[row], side.shape(row))
    return list(seen.items())


def _other_words(old: str, new: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of two names that differ. Insertions and deletions come with their neighbour."""
    left, right = old.split("."), new.split(".")
    for what, i, j, k, m in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if what == "replace":
            yield ".".join(left[i:j]), ".".join(right[k:m])
        elif what != "equal":
            before, after = (0, 1) if j < len(left) else (1, 0)
            yield ".".join(left[max(0, i - before) : j + after]), ".".join(right[max(0, k - before) : m + after])


def _numbered(old: str, new: str) -> str:
    """Return a rule for a name, and for all names that differ from it in numbers only."""
    left, right = old.split("."), new.split(".")
    if [part for part in left if part.isdecimal()] != [part for part in right if part.isdecimal()]:
        return f"^{re.escape(old)}$={new}"
    found = "\\.".join("(\\d+)" if part.isdecimal() else re.escape(part) for part in left)
    group = count(1)
    return f"^{found}$=" + ".".join(f"\\{next(group)}" if part.isdecimal() else part for part in right)

"""Which record of the candidate belongs to which of the reference, by identity and after renames; and what is left."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import count

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
    """How the candidate's names become the reference's: regular expressions, tried in order, and exact names."""

    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()
    exact: Mapping[str, str] | None = None

    @classmethod
    def of(cls, rules: Sequence[str], exact: Mapping[str, str] | None = None) -> Renames:
        """From 'PATTERN=REPLACEMENT' texts."""
        patterns = []
        for rule in rules:
            pattern, equals, replacement = rule.rpartition("=")  # a pattern may have one, as in (?=...)
            if not equals:
                raise UsageError(f"rename {rule!r} has no '=': write 'PATTERN=REPLACEMENT', like '^model\\.='")
            try:
                patterns.append((re.compile(pattern), replacement))
            except re.error as error:
                raise UsageError(f"rename {rule!r}: {pattern!r} is no regular expression: {error}") from error
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
    """Renames for two files of one call each: the module of the one is that of the other, whatever it is called."""
    ours, theirs = reference.only_module, candidate.only_module
    return Renames() if ours is None or theirs is None or ours == theirs else Renames(exact={theirs: ours})


def _check_template(rule: str, pattern: re.Pattern[str], replacement: str) -> None:
    """That the replacement means something is told before any name is met that it would apply to."""
    try:
        re.compile(f"{pattern.pattern}|", pattern.flags).sub(replacement, "")  # matches, with every group empty
    except (re.error, IndexError) as error:
        raise UsageError(
            f"rename {rule!r}: {replacement!r} is no replacement for {pattern.pattern!r}: {error}"
        ) from error


def _plain(name: str) -> str:
    """The root is shown as "(root)", and may be written so."""
    return "" if name == display_name("") else name


@dataclass(frozen=True)
class Alignment:
    """Row numbers on both sides of every pair, in the reference's order, and of what only one side has."""

    reference: Ints
    candidate: Ints
    only_reference: Ints
    only_candidate: Ints


def align(
    reference: Side,
    candidate: Side,
    rename: Callable[[str], str] | None = None,
    steps: Mapping[int, int] | None = None,
    ranks: Mapping[int, int] | None = None,
) -> Alignment:
    """Pair records of the same identity and rank. `steps` and `ranks` say which of the reference's number belongs to
    the candidate's."""
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
    # One identity should not come twice. Where it does, the first goes with the first, the second with the second.
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
        raise UsageError(f"{twice} of the candidate is to be compared with several of the reference: say one of them")
    values, inverse = np.unique(numbers, return_inverse=True)
    return np.array([back.get(int(value), -1 - int(value)) for value in values], np.int64)[inverse]


def _occurrences(identity: Ints) -> Ints:
    """For each row, how many before it have the same identity."""
    order = np.argsort(identity, kind="stable")
    ordered = identity[order]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    found = np.empty(len(identity), np.int64)
    found[order] = np.arange(len(identity)) - np.repeat(first, np.diff(first, append=len(identity)))
    return found


def _shared(left: Names, right: Names) -> tuple[Ints, Ints]:
    """Codes that stand for the same word on both sides."""
    words = {word: code for code, word in enumerate(dict.fromkeys([*left.words, *right.words]))}
    return (
        np.array([words[w] for w in left.words], np.int64)[left.codes] if left.words else left.codes,
        np.array([words[w] for w in right.words], np.int64)[right.codes] if right.words else right.codes,
    )


def _joined(pairs: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Several columns as one number a row. Numbers are made dense whenever they would outgrow 64 bits."""
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
    """Renames that would make the candidate's names match the reference's: a prefix, or other words for modules that
    run in the same order with the same shapes. The texts are ready for --rename."""
    ours, theirs = set(reference.module.words) - {""}, set(candidate.module.words) - {""}
    best, most = [], len(ours & theirs)
    for rules in (_by_prefix(ours, theirs), *_by_order(reference, candidate)):
        matched = len(ours & set(map(Renames.of(rules), theirs)))
        if matched > most:
            best, most = rules, matched
    return best


def _by_prefix(ours: set[str], theirs: set[str]) -> list[str]:
    """One beginning of the names instead of another; either may be nothing."""
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
    """A name's possible prefixes, with what is left of it."""
    parts = name.split(".")
    for cut in range(min(3, len(parts))):
        yield ".".join(parts[:cut]), ".".join(parts[cut:])


def _by_order(reference: Side, candidate: Side) -> Iterator[list[str]]:
    """Modules that run in the same order with the same output shape, under other names: by the words that differ, and
    should those mean several things, by whole names."""
    ours, theirs = _outline(reference), _outline(candidate)
    if [shape for _, shape in ours] != [shape for _, shape in theirs]:
        return
    renamed = {old: new for (new, _), (old, _) in zip(ours, theirs, strict=True) if old != new and old and new}
    words = Counter(words for old, new in renamed.items() for words in _other_words(old, new))
    # Longer ones first: what is left of a name after a shorter one no longer matches.
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
    """The parts of a name that differ from the other's. What was put in or left out is taken with its neighbour."""
    left, right = old.split("."), new.split(".")
    for what, i, j, k, m in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if what == "replace":
            yield ".".join(left[i:j]), ".".join(right[k:m])
        elif what != "equal":
            before, after = (0, 1) if j < len(left) else (1, 0)
            yield ".".join(left[max(0, i - before) : j + after]), ".".join(right[max(0, k - before) : m + after])


def _numbered(old: str, new: str) -> str:
    """A rule for a name, and for all that differ from it in numbers only."""
    left, right = old.split("."), new.split(".")
    if [part for part in left if part.isdecimal()] != [part for part in right if part.isdecimal()]:
        return f"^{re.escape(old)}$={new}"
    found = "\\.".join("(\\d+)" if part.isdecimal() else re.escape(part) for part in left)
    group = count(1)
    return f"^{found}$=" + ".".join(f"\\{next(group)}" if part.isdecimal() else part for part in right)

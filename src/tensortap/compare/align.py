"""Which record of the candidate belongs to which of the reference, by identity and after renames; and what is left."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensortap.compare.side import Names, Side
from tensortap.errors import UsageError

__all__ = ["Alignment", "Renames", "align", "suggest"]

Ints = npt.NDArray[np.int64]


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
        return cls(tuple(patterns), exact)

    def __bool__(self) -> bool:
        return bool(self.patterns or self.exact)

    def __call__(self, name: str) -> str:
        if self.exact and name in self.exact:
            return self.exact[name]
        for pattern, replacement in self.patterns:
            name = pattern.sub(replacement, name)
        return name


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
    values, inverse = np.unique(numbers, return_inverse=True)
    return np.array([back.get(int(value), -1 - int(value)) for value in values], np.int64)[inverse]


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
    """Renames that would make the candidate's names match the reference's: a prefix, or modules in the same order with
    the same classes. The texts are ready for --rename."""
    ours, theirs = set(reference.module.words) - {""}, set(candidate.module.words) - {""}
    if not ours or not theirs:
        return []
    prefixes: Counter[tuple[str, str]] = Counter()
    by_tail: dict[str, list[str]] = {}
    for name in ours:
        parts = name.split(".")
        for cut in range(min(3, len(parts))):
            by_tail.setdefault(".".join(parts[cut:]), []).append(".".join(parts[:cut]))
    for name in theirs - ours:
        parts = name.split(".")
        for cut in range(min(3, len(parts))):
            for prefix in by_tail.get(".".join(parts[cut:]), ()):
                prefixes[".".join(parts[:cut]), prefix] += 1
    if prefixes:
        (old, new), count = prefixes.most_common(1)[0]
        if old != new and count * 2 >= len(theirs - ours):
            return [f"^{re.escape(old)}\\.={new}." if old and new else f"^{re.escape(old)}\\.=" if old else f"^={new}."]
    return _by_order(reference, candidate)


def _by_order(reference: Side, candidate: Side) -> list[str]:
    """Modules that run in the same order with the same class and output shape, under other names."""

    def outline(side: Side) -> list[tuple[str, str, tuple[int, ...]]]:
        outputs = [row for row in range(min(len(side), 20_000)) if side.kind[row] in ("output", "param")]
        seen: dict[str, tuple[str, tuple[int, ...]]] = {}
        for row in outputs:
            seen.setdefault(side.module[row], (side.cls[row], side.shape(row)))
        return [(name, cls, shape) for name, (cls, shape) in seen.items()]

    ours, theirs = outline(reference), outline(candidate)
    if len(ours) != len(theirs) or [o[1:] for o in ours] != [t[1:] for t in theirs]:
        return []
    renamed = {t[0]: o[0] for o, t in zip(ours, theirs, strict=True) if o[0] != t[0]}
    words: Counter[tuple[str, str]] = Counter()
    for old, new in renamed.items():
        left, right = old.split("."), new.split(".")
        if len(left) == len(right):
            words.update((a, b) for a, b in zip(left, right, strict=True) if a != b)
    return [f"\\b{re.escape(old)}\\b={new}" for (old, new), _ in words.most_common(5)]

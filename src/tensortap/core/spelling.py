"""Suggests module names for a pattern that matches none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["close_names"]

_LEAST_RATIO = 0.6
"""Similarity below which a name is no suggestion, from 0 to 1."""


def close_names(patterns: Iterable[str], names: Sequence[str], most: int = 3) -> list[str]:
    """Return the names that are spelt most like the patterns, best first.

    A pattern may be a part of a name: `atn` is close to `blocks.0.attn`. Case and wildcards do not count.

    >>> close_names(["Layer.1*"], ["embed", "layers.0", "layers.1"], most=1)
    ['layers.1']
    """
    scores: dict[str, float] = {}
    for pattern in patterns:
        matcher = difflib.SequenceMatcher(autojunk=False)
        matcher.set_seq2(wanted := pattern.replace("*", "").strip(".").lower())
        for name in names:
            ratio = max(_ratio(matcher, part) for part in _parts(name.lower(), wanted.count(".") + 1))
            scores[name] = max(ratio, scores.get(name, 0.0))
    close = [name for name in names if scores.get(name, 0.0) >= _LEAST_RATIO]
    return sorted(close, key=lambda name: (-scores[name], len(name)))[:most]


def _parts(name: str, length: int) -> set[str]:
    """Return the name, and each run of `length` of its components."""
    components = name.split(".")
    starts = range(len(components) - length + 1)
    return {name, *(".".join(components[start : start + length]) for start in starts)}


def _ratio(matcher: difflib.SequenceMatcher[str], part: str) -> float:
    matcher.set_seq1(part)
    if matcher.real_quick_ratio() < _LEAST_RATIO or matcher.quick_ratio() < _LEAST_RATIO:
        return 0.0
    return matcher.ratio()

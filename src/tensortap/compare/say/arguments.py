"""The plain arguments in which two calls differ."""

from __future__ import annotations

from collections.abc import Sequence

from tensortap.core.arguments import ABSENT, ArgumentDifference, in_words
from tensortap.core.records import Finding

__all__ = ["describe_call", "describe_other_arguments"]

_MOST_ARGUMENTS = 3


def describe_call(first: Finding) -> str:
    """Return a further sentence if the module to inspect was called with other arguments."""
    return f" It was called with {describe_other_arguments(first.arguments)}." if first.arguments else ""


def describe_other_arguments(others: Sequence[ArgumentDifference]) -> str:
    """Name the plain arguments in which two calls differ.

    >>> describe_other_arguments([ArgumentDifference("is_causal", True, False), ArgumentDifference("scale", 0.5, 1.0)])
    'is_causal=True in the reference and False in the candidate, scale=0.5 and 1.0'
    """
    words: list[str] = []
    for path, ours, theirs in others[:_MOST_ARGUMENTS]:
        if ours is ABSENT or theirs is ABSENT:
            side, value = ("candidate", theirs) if ours is ABSENT else ("reference", ours)
            words.append(f"{path}={in_words(value)} in the {side} alone")
        else:
            where = ("", "") if words else (" in the reference", " in the candidate")
            words.append(f"{path}={in_words(ours)}{where[0]} and {in_words(theirs)}{where[1]}")
    rest = len(others) - _MOST_ARGUMENTS
    return ", ".join(words) + (f" and {rest} more" if rest > 0 else "")

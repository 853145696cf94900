"""The sentence about two runs that match, and the pairs in it that need words."""

from __future__ import annotations

from collections.abc import Mapping

from tensortap.compare.say.formatting import rounded

__all__ = ["describe_large", "describe_match", "describe_rounding_alone", "describe_worst"]


def describe_match(counts: Mapping[str, int], worst: str | None, agree: str = "The runs match") -> str:
    """Say that the runs match, and how closely; `worst` describes the worst pairs within tolerance."""
    pairs = sum(counts.get(name, 0) for name in ("equal", "close", "unjudged"))
    if not counts.get("close") and not counts.get("unjudged"):
        all_of_them = f"all {pairs:,} pairs are" if pairs > 1 else "the one pair there is, is"
        text = f"{agree}: {all_of_them} equal bit for bit"
    else:
        text = f"{agree}: of {pairs:,} pair{'s' if pairs > 1 else ''}, "
        text += f"{counts.get('equal', 0):,} are equal bit for bit"
        text += f" and {counts.get('close', 0):,} within tolerance"
        if worst:
            text += f" ({worst})"
        if counts.get("unjudged"):
            text += f"; {counts['unjudged']:,} could not be judged"
    if counts.get("unmatched"):
        alone = counts["unmatched"]
        text += f"; {alone:,} record{'s are' if alone > 1 else ' is'} on one side only"
    return text + "."


def describe_worst(off: float, key: str) -> str:
    """Say how far off the worst pair within tolerance is."""
    return f"at most {rounded(off)} off, at {key}"


def describe_rounding_alone(pairs: int, key: str, alone: bool) -> str:
    """Say which sums cancel out, so that both sides consist of rounding and their relative error means nothing."""
    more = "" if alone else "more "
    if pairs == 1:
        return f"one {more}cancels out and consists of rounding alone on both sides, {key}"
    return f"{pairs:,} {more}cancel out and consist of rounding alone on both sides, as {key}"


def describe_large(pairs: int, off: float, key: str, rule: str, alone: bool) -> str:
    """Say which pairs are far off, relative to their size, and still within tolerance."""
    more = "" if alone else "more "
    if pairs == 1:
        return f"one {more}differs by {rounded(off)}, {key}: {rule}"
    return f"{pairs:,} {more}differ by up to {rounded(off)}, as {key}: {rule}"

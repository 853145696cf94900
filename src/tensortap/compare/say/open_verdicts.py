"""Sentences of open verdicts: why it cannot be told whether the runs match, and what would tell."""

from __future__ import annotations

from tensortap.compare.say.formatting import rounded

__all__ = [
    "describe_none_judged",
    "describe_open",
    "describe_open_ties",
    "describe_overflow",
    "describe_read_hidden",
    "describe_too_little",
    "describe_undecided",
    "describe_unrelated",
    "describe_unsupported",
    "ways_to_tell",
]


def describe_too_little(reference: int, candidate: int, pairs: int, unpaired: str = "") -> str:
    """Say why the runs cannot be judged. `unpaired` names the ranks without a counterpart."""
    begin = "Too little in common to judge: " + (f"{unpaired}; " if unpaired else "")
    if not reference or not candidate:
        empty = "reference" if not reference else "candidate"
        return f"{begin}the {empty} has no records that take part."
    return (
        f"{begin}of {reference:,} records of the reference and {candidate:,} of the candidate "
        f"only {pairs:,} have the same identity."
    )


def describe_unrelated(reference: str, candidate: str) -> str:
    """Say that two models have no module in common."""
    return (
        f"Too little in common to judge: the reference is a {reference} and the candidate a {candidate}, and no module "
        "of one has its name in the other. If they are one architecture under other names, --map with an empty file "
        "maps them by structure."
    )


def describe_none_judged(pairs: int) -> str:
    """Say that the runs have records in common, none of which could be judged."""
    if pairs == 1:
        return "Too little to judge: the one pair there is could not be judged."
    return f"Too little to judge: none of the {pairs:,} pairs could be judged."


def describe_undecided(guessed: str) -> str:
    """Say that the verdict is open, because only pairs that were guessed differ."""
    return f"Cannot tell whether the runs match. {guessed[0].upper()}{guessed[1:]}."


def describe_open(why: str, ways: str, rest: str) -> str:
    """Say that the verdict is open, why, and what would show more.

    >>> describe_open("2 pairs differ", "compare fewer steps", "All else matches.")
    'Cannot tell whether the runs match: 2 pairs differ. To tell, compare fewer steps. All else matches.'
    """
    return f"Cannot tell whether the runs match: {why}. To tell, {ways}. {rest}"


def describe_open_ties(pairs: int, ways: str, rest: str) -> str:
    """Say that the verdict is open, because tokens chose other experts or codes and pairs depend on them."""
    which = f"{pairs:,} pair{'s depend' if pairs > 1 else ' depends'} on tokens that chose another expert or code"
    return describe_open(which, ways, rest)


def describe_overflow(key: str, side: str, dtype: str, pairs: int) -> str:
    """Say that the verdict is open, because the numbers of one side are beyond the range of its dtype.

    >>> describe_overflow("up · output 0", "candidate", "float16", 9)
    'Cannot tell whether the runs match: the candidate overflows at up · output 0, where the numbers of the other side \
are beyond the range of float16. From there on, 9 pairs could not be judged. To tell, compare in a dtype that holds \
these numbers.'
    """
    return (
        f"Cannot tell whether the runs match: the {side} overflows at {key}, where the numbers of the other side are "
        f"beyond the range of {dtype}. From there on, {pairs:,} pair{'s' * (pairs > 1)} could not be judged. To tell, "
        "compare in a dtype that holds these numbers."
    )


def describe_read_hidden(rest: str) -> str:
    """Say that the verdict is open, because the loss depends on positions at which two kinds of attention differ."""
    return (
        "Cannot tell whether the runs match: the loss reads positions that a mask hides, such as the padding before a "
        "text, and two kinds of attention return other values there. Leave these positions out of the loss, as by the "
        f"label -100 of the first token after the padding. {rest}"
    )


def describe_unsupported(pairs: int, step: int, off: float, worst: str, has_optimizer: bool = False) -> str:
    """Say that the verdict is open, because parameters were not recorded and differences depend on them.

    has_optimizer: whether the capture knew the optimizer, whose parameters it records unless `kinds=` leaves them out.

    >>> describe_unsupported(1, 1, 3e-5, "fc · output 0").partition(". ")[0]
    'Cannot tell whether the runs match: from step 1 on, 1 pair is off by 3.0e-5 (fc · output 0)'
    """
    which = f"{pairs:,} pairs are off by up to" if pairs > 1 else "1 pair is off by"
    return (
        f"Cannot tell whether the runs match: from step {step} on, {which} {rounded(off)} ({worst}). That may be "
        "gradient noise that an optimizer magnified, or a wrong optimizer: parameters were not recorded. Capture with "
        + "optimizer=, or " * (not has_optimizer)
        + 'kinds=(..., "param").'
    )


def ways_to_tell(checked: bool, several_steps: bool, short: bool) -> str:
    """Return what would show more where a verdict is open: in a check no error propagates.

    checked: whether it is a check already, or none is possible, as between two frameworks.
    several_steps: whether more than one step was compared.
    short: whether anything was computed in a short dtype.

    >>> ways_to_tell(True, True, True)
    'compare fewer steps, or in float32'
    """
    ways = [] if checked else ["check the candidate on the reference's own inputs (tensortap.check)"]
    if several_steps:
        ways.append("compare fewer steps")
    if short:
        ways.append("in float32" if several_steps else "compare in float32")
    return ", or ".join(ways or ["measure the noise of the reference (tensortap.noise)"])

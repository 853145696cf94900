"""Terms of the loss that only the reference differentiates: auxiliary losses that the candidate detaches or leaves out.

Such a term may move all gradients by less than rounding does in bfloat16. Its own gradient shows it: a module returns a
single number on both sides, and only the reference's gets a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from tensortap.compare.judge.causes import is_within
from tensortap.compare.matched import Matched
from tensortap.core.records import Key

__all__ = ["lost_terms"]

_MOST_PARTS, _NEARLY = 64, 1e-3
"""A mean over up to this many micro batches is no weight of a term."""


def lost_terms(matched: Matched) -> Callable[[int, Key], bool]:
    """Return a function of a gradient that only the reference has: whether it is that of a term of the loss."""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    own = alignment.only_candidate[right.kind.among(("grad_output",))[alignment.only_candidate]]
    elsewhere = {(key.step, key.micro) for key in map(right.key, own.tolist())}
    alone = left.called - right.called if matched.plan is None else frozenset[str]()
    unseen = [name for name in alone if right.may_have(name)]

    def is_term(row: int, key: Key) -> bool:
        if any(is_within(name, key.module) for name in unseen):
            return False  # code that runs unseen, as in a compiled graph, may compute the loss there
        if key.kind != "grad_output" or int(left.elements[row]) != 1 or (key.step, key.micro) in elsewhere:
            return False  # where the candidate has a gradient of its own, it may compute the term there
        weight = float(left.l2[row])
        return 0 < weight < 1 and not _is_mean(weight)

    return is_term


def _is_mean(weight: float) -> bool:
    """Whether a gradient is that of a whole loss, which one side may compute from other outputs just as well."""
    parts = round(1 / weight)
    return parts <= _MOST_PARTS and abs(weight * parts - 1) <= _NEARLY

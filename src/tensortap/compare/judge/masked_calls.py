"""Records made before any attention: a mask that hides positions explains no difference there."""

from __future__ import annotations

from tensortap.compare.judge.causes import is_within
from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.structure import Structure

__all__ = ["precedes_attention"]


def precedes_attention(row: int, pairs: Pairs, structure: Structure) -> bool:
    """Whether a record of the first step was made before any module ran that is given a mask which hides positions.

    After an optimizer's step, the embedding of padding differs as well, and with it what is made before attention.
    """
    if not structure.is_at_start(row):
        return False
    given = {structure.module[each] for each, mask in pairs.masks.items() if mask.frees_positions}
    innermost = [name for name in given if not any(is_within(other, name) for other in given)]
    scope = structure.scope[row]
    calls = [call for name in innermost for call in structure.calls_of_module.get((scope, name), ())]
    return bool(calls) and structure.seq[row] < min(call.begin for call in calls)

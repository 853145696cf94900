"""Find from summaries where a forward pass is wrong beside positions that a mask hides.

Two kinds of attention differ at positions that see nothing, and so does all that is made from these. A summary does not
show positions. But its largest and its smallest element are single elements, most of them at other positions: as long
as one of the two agrees, the rest most likely does. From a mistake on, both differ in nearly every record. So the
record from which on they differ shows the mistake. In small tensors, the sums of the sketch tell it of a single record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.judging import Judgement
from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.structure import Structure
from tensortap.compare.measure.hidden import EXTREMES_AGREE
from tensortap.core.records import WRONG_STATUSES, Finding

__all__ = ["ShownElements", "rows_with_right_extremes", "with_right_extremes"]

_FORWARD = ("input", "output")
_SHORT = 2.0**-10
_AGREES = 4.0
"""Times the rounding of a record that its largest element may be off."""
_LEAST, _MOST_BEFORE, _MOST_AFTER = 8, 1 / 8, 2 / 5
"""Records that a decision takes; the share of those before a mistake that may disagree; and of those after it that may
agree, as single positions do that the mistake does not reach."""

_ENOUGH = 0.9
"""Share of the sums without hidden elements that must agree: rounding may move single ones further."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ShownElements:
    """What summaries show of elements at positions that are not hidden."""

    ranges: Callable[[int], tuple[tuple[float, float], tuple[float, float]]]
    """Smallest and largest element of a pair's two sides."""
    agreeing: Callable[[int, float], float | None]
    """Which share of the sums without hidden elements agrees, of a pair with some rounding; None if not known."""
    hidden: float
    """The share of hidden positions, as far as it is known."""

    def agree(self, row: int, error: float, rounding: float, made_by_attention: bool) -> tuple[bool, bool]:
        """Return whether these elements seem to agree, and whether that is certain."""
        share = self.agreeing(row, rounding)
        if share is not None:
            return share >= _ENOUGH, True
        # What attention makes of hidden positions is a mean, or zero: no larger than elsewhere.
        if made_by_attention and error > 2 * self.hidden**0.5:
            return False, False
        return _agrees(rounding, made_by_attention, *self.ranges(row)), False


def rows_with_right_extremes(
    judgement: Judgement,
    pairs: Pairs,
    structure: Structure,
    births: Sequence[Finding],
    shown: ShownElements,
) -> set[int]:
    """Return the wrong rows of the first wrong forward pass that come before the mistake, or do not depend on it.

    Empty if the first finding has nothing to do with hidden positions, or is the mistake itself.
    """
    first = births[0].row if births else None
    given = {structure.module[row] for row, mask in pairs.masks.items() if mask.is_other_convention}
    if first is None or births[0].module not in given or structure.kind[first] not in _FORWARD:
        return set()
    scope = structure.scope[first]
    if pairs.isolated is not None or not np.isnan(pairs.mismatched[first]):  # elements are known
        return set()
    wrong = judgement.having(*WRONG_STATUSES)
    own = [
        row
        for row, kind in enumerate(structure.kind)
        if wrong[row] and kind in _FORWARD and structure.scope[row] == scope and pairs.base[row] < _SHORT
    ]
    seen = [row for row in own if structure.first_seen[row] == row]
    attended = _made_by_attention(structure, scope, given)
    if not attended or not wrong[min(attended)]:  # the first attention would differ, too
        return set()
    found = [shown.agree(row, float(pairs.error[row]), float(pairs.base[row]), row in attended) for row in seen]
    agree, known = np.array(found, bool).reshape(-1, 2).T
    begin = _first_known(agree, known)
    begin = _begin_of_mistake(agree) if begin is None else begin
    if begin is None or begin == 0:
        return set()
    right = {row for place, row in enumerate(seen) if place < begin or agree[place]}
    return {row for row in own if structure.first_seen[row] in right}


def with_right_extremes(pairs: Pairs, rows: set[int]) -> Pairs:
    """Return the pairs with these rows as if they were equal, but for what a limit says."""
    error = pairs.error.copy()
    error[list(rows)] = 0.0
    return replace(pairs, error=error, limits={**pairs.limits, **dict.fromkeys(rows, EXTREMES_AGREE)})


def _agrees(rounding: float, both: bool, ours: tuple[float, float], theirs: tuple[float, float]) -> bool:
    """Whether the smallest or the largest elements agree; or both."""
    size = max(abs(each) for each in (*ours, *theirs))
    near = [abs(one - other) <= _AGREES * rounding * size for one, other in zip(ours, theirs, strict=True)]
    return all(near) if both else any(near)


def _made_by_attention(structure: Structure, scope: tuple[int, int, int], given: set[str]) -> set[int]:
    """Return what attention makes: outputs of the innermost modules that are given a mask, and what the last module
    inside these, a projection, is given and returns.

    There, both extremes must agree. Hidden positions are small, so neither is one of them. The first position of a
    causal text is large, since it sees only itself, and hardly any mistake reaches it.
    """
    innermost = [name for name in given if not any(other.startswith(f"{name}.") for other in given)]
    found: set[int] = set()
    for name in innermost:
        for call in structure.calls_of_module.get((scope, name), ()):
            last = call.children[-1:]
            found.update(call.of("output"), *(child.of("input", "output") for child in last))
    return {structure.first_seen[row] for row in found}


def _first_known(agree: Bools, known: Bools) -> int | None:
    """Return the place of the first record whose sums show that it disagrees, or of those right before it that seem to;
    None if there is none."""
    wrong = np.flatnonzero(known & ~agree)
    if not wrong.size:
        return None
    begin = int(wrong[0])
    while begin and not agree[begin - 1]:
        begin -= 1
    return begin


def _begin_of_mistake(agree: Bools) -> int | None:
    """Return the place from which on records disagree; their number if none does; None if there is no such place."""
    if len(agree) < _LEAST:
        return None
    disagreeing_before = np.concatenate([[0], np.cumsum(~agree)])
    agreeing_after = np.concatenate([np.cumsum(agree[::-1])[::-1], [0]])
    begin = int(np.argmin(disagreeing_before + agreeing_after))
    before, after = begin, len(agree) - begin
    if disagreeing_before[begin] > _MOST_BEFORE * before or agreeing_after[begin] > _MOST_AFTER * after:
        return None
    return begin

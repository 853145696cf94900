"""Find from summaries where a forward pass is wrong beside positions that a mask hides.

Two kinds of attention differ at positions that see nothing, and so does all that is made from these. A summary does not
show positions, but something of the others (`ShownElements`). Before a mistake most of it agrees, from it on less does.
So the place from which on more speaks for a mistake than against one is where it begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.masked_calls import precedes_attention
from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.shown_elements import ShownElements, Sign, rounded_extreme
from tensortap.compare.judge.structure import Structure
from tensortap.compare.measure.hidden import EXTREMES_AGREE
from tensortap.compare.measure.ranges import Range
from tensortap.core.records import WRONG_STATUSES, Finding

__all__ = ["begin_of_mistake", "rows_with_right_extremes", "with_right_extremes"]

_FORWARD = ("input", "output")
_SHORT = 2.0**-10
_LEAST = 8
"""Records that a decision takes if none is certain."""
_OWN_CODE, _ATTENTION = 1.5, 3.0
"""How much speaks beforehand for a mistake in code between modules, or after the forward, rather than in a single
layer: there is more code. Most of it is in an attention."""


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
    given = {structure.module[row] for row, mask in pairs.masks.items() if mask.frees_positions}
    if first is None or births[0].module not in given or structure.kind[first] not in _FORWARD:
        return set()
    scope = structure.scope[first]
    if pairs.isolated is not None or first in pairs.shown or not np.isnan(pairs.mismatched[first]):
        return set()  # its other positions are known
    if precedes_attention(first, pairs, structure):
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
    blind = abs(shown.zeros_apart(min(attended)))
    bounds = _bounds(seen, structure, shown.ranges)
    shown = replace(shown, blind=blind if blind <= shown.hidden else 0.0, bounds=bounds)
    signs = [shown.sign(row, float(pairs.error[row]), float(pairs.base[row]), row in attended) for row in seen]
    begin = begin_of_mistake(signs, [_beforehand(row, structure, row in attended) for row in seen])
    if begin is None or begin == 0:
        return set()
    right = {row for place, row in enumerate(seen) if place < begin or (place > begin and signs[place].weight < 0)}
    return {row for row in own if structure.first_seen[row] in right}


def with_right_extremes(pairs: Pairs, rows: set[int]) -> Pairs:
    """Return the pairs with these rows as if they were equal, but for what a limit says."""
    return pairs.as_equal(rows, EXTREMES_AGREE)


def _bounds(
    rows: Sequence[int], structure: Structure, ranges: Callable[[int], tuple[Range, Range]]
) -> frozenset[float]:
    """Return the extremes that a kind of module has again and again, as an activation its least value; and zero."""
    places = {(rounded_extreme(each), structure.module[row]) for row in rows for each in ranges(row)[0]}
    times = Counter((value, module.rpartition(".")[2]) for value, module in places)
    return frozenset({0.0} | {value for (value, _), count in times.items() if count > 1})


def _beforehand(row: int, structure: Structure, made_by_attention: bool) -> float:
    """Return how much speaks for a mistake in the code that made a record, before anything is known of it.

    Code between modules made it if it is handed to a module, or returned by one that calls others.
    """
    call = structure.call_of(row)
    if structure.kind[row] != "input" and (call is None or not call.children):
        return 0.0
    return _ATTENTION if made_by_attention else _OWN_CODE


def _made_by_attention(structure: Structure, scope: tuple[int, int, int], given: set[str]) -> set[int]:
    """Return what attention makes: outputs of the innermost modules that are given a mask, and what the last module
    inside these, a projection, is given and returns.

    There, hidden positions are small, so that no extreme is one of them.
    """
    innermost = [name for name in given if not any(other.startswith(f"{name}.") for other in given)]
    found: set[int] = set()
    for name in innermost:
        for call in structure.calls_of_module.get((scope, name), ()):
            last = call.children[-1:]
            found.update(call.of("output"), *(child.of("input", "output") for child in last))
    return {structure.first_seen[row] for row in found}


def begin_of_mistake(signs: Sequence[Sign], beforehand: Sequence[float]) -> int | None:
    """Return the place from which on most speaks for a mistake: not after the first record that certainly disagrees,
    nor before one that certainly agrees; their number if there is none; None if there are too few to say.

    beforehand: what speaks for a mistake at each record before anything is known of it.
    """
    weights = np.array([sign.weight for sign in signs])
    certain = np.array([sign.certain for sign in signs], bool)
    wrong = np.flatnonzero(certain & (weights > 0))
    if len(signs) < _LEAST and not wrong.size:
        return None
    last = int(wrong[0]) if wrong.size else len(signs)
    right = np.flatnonzero(certain[:last] & (weights[:last] < 0))
    least = int(right[-1]) + 1 if right.size else 0
    after = np.concatenate([np.cumsum(weights[::-1])[::-1], [0.0]])
    after += np.array([*beforehand, _OWN_CODE])
    return least + int(np.argmax(after[least : last + 1]))

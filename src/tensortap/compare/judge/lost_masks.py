"""Masks, and other tensors, that one side hands to a module while the other hands none.

None means the same as a mask that hides nothing, and to an attention that knows it is causal, the same as a causal one.
A mask that hides anything else, such as padding, is missed by what it was meant for: then the code that should have
handed it on is at fault, not the module that did as it was told. So it is with numbers, such as positions or an
embedding of them, in place of which the other side hands a module of the same class None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.steps.calls import CallRows, Spot
from tensortap.compare.measure.mask_sketches import hidden_pattern
from tensortap.core.arguments import read
from tensortap.core.causes import Cause
from tensortap.core.sketches import fold
from tensortap.kernels import summarize

__all__ = ["LostMask", "find_lost_masks", "innermost_without", "outermost_without"]

_MOST_ELEMENTS = 1 << 27
"""Masks beyond this are not compared with a causal one, which would have to be made first."""


class LostMask(NamedTuple):
    """A mask, or another tensor, that one side alone hands to a call."""

    path: str
    cause: Cause
    content: tuple[tuple[int, ...], int] = ((), 0)
    """Its shape, and how many elements it hides; -1 if it is not a mask."""


def find_lost_masks(
    reference: Side, candidate: Side, alignment: Alignment, has_same_settings: Callable[[str], bool]
) -> Mapping[Spot, LostMask]:
    """Return the calls that one side alone gives a mask that hides something other than the future; or the future, to
    a module with the same settings on both sides: it knows that it is causal on both, or on none. And those that one
    side gives numbers, and the other None.
    """
    found = dict(_given_none(candidate, reference, alignment.only_candidate, Cause.EXTRA_INPUT))
    found.update(_given_none(reference, candidate, alignment.only_reference, Cause.LOST_INPUT))
    found.update(_hiding(candidate, alignment.only_candidate, Cause.EXTRA_MASK, has_same_settings))
    found.update(_hiding(reference, alignment.only_reference, Cause.LOST_MASK, has_same_settings))
    return found


def _given_none(side: Side, other: Side, alone: Any, cause: Cause) -> Iterator[tuple[Spot, LostMask]]:
    """Yield the calls that one side hands numbers, and the other hands None in their place."""
    if not len(alone):
        return
    numbers = [name for name in side.dtype.words if name != "bool"]
    rows = alone[side.kind.among(("input",))[alone] & side.dtype.among(numbers)[alone]]
    rows = np.setdiff1d(rows, [row for row, hidden, _ in hidden_pattern(side, rows) if hidden])
    codes, firsts = np.unique(other.module.codes, return_index=True)
    classes = {other.module.words[code]: other.cls[first] for code, first in zip(codes, firsts, strict=True)}
    for row in rows.tolist():
        rank, module, path = int(side.rank[row]), side.module[row], side.path[row]
        calls = other.run.calls(rank) if rank in other.ranks else None
        if calls is None or classes.get(module) != side.cls[row]:
            continue
        step, micro, number = (int(column[row]) for column in (side.step, side.micro, side.call))
        given = read(calls.of(step, micro, module, number))
        if _is_none(path, given):
            yield ((rank, step, micro), module, number), LostMask(path, cause, (side.shape(row), -1))


def _is_none(path: str, given: Mapping[str, Any]) -> bool:
    """Whether None was given in place of a value, or of the tuple or dictionary that it is a part of."""
    parts = path.split(".")
    around = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return any(each in given and given[each] is None for each in around)


def _hiding(
    side: Side, alone: Any, cause: Cause, has_same_settings: Callable[[str], bool]
) -> Iterator[tuple[Spot, LostMask]]:
    rows = alone[side.kind.among(("input",))[alone]] if len(alone) else alone
    if not len(rows):
        return
    for row, hidden, pattern in hidden_pattern(side, rows):
        if hidden and (not _is_causal(side.shape(row), hidden, pattern) or has_same_settings(side.module[row])):
            scope = int(side.rank[row]), int(side.step[row]), int(side.micro[row])
            yield (
                (scope, side.module[row], int(side.call[row])),
                LostMask(side.path[row], cause, (side.shape(row), hidden)),
            )


def _is_causal(shape: tuple[int, ...], hidden: int, pattern: Any) -> bool:
    """Whether a mask hides from each position exactly those after it."""
    if len(shape) < 2 or shape[-1] != shape[-2] or np.prod(shape) > _MOST_ELEMENTS:
        return False
    expected, sketch = _causal(shape)
    if pattern is None or hidden != expected:
        return bool(hidden == expected)
    return float(np.square(pattern - fold(sketch, pattern.size)[0]).sum()) < 0.25


@cache
def _causal(shape: tuple[int, ...]) -> tuple[int, Any]:
    """Return how many elements a causal mask hides, and the sketch of them, each as -1."""
    future = np.triu(np.ones(shape[-2:], bool), 1)
    summary = summarize(np.ascontiguousarray(np.broadcast_to(future, shape)))
    return summary.elements - summary.zeros, -summary.sketch[None]


def outermost_without(call: CallRows, lost: Mapping[Spot, LostMask]) -> CallRows:
    """Return the outermost call around that lacks the same mask, too: its caller failed to hand it on."""
    while call.parent is not None and call.parent.spot in lost and not _lacks_another(call, call.parent, lost):
        call = call.parent
    return call


def _lacks_another(call: CallRows, parent: CallRows, lost: Mapping[Spot, LostMask]) -> bool:
    """Whether the call's parent lacks the mask of another call inside. It may lack the call's own in another shape."""
    content, around = lost[call.spot].content, lost[parent.spot].content
    others = (lost[child.spot].content for child in parent.children if child.spot in lost)
    return content != around and around in others


def innermost_without(call: CallRows, lost: Mapping[Spot, LostMask]) -> list[CallRows]:
    """Return the innermost calls inside that lack the same mask, too: what they compute depends on it."""
    content = lost[call.spot].content
    without = [child for child in call.children if child.spot in lost and lost[child.spot].content == content]
    return [each for child in without for each in innermost_without(child, lost)] or [call]

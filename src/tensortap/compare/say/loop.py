"""Sentences and notes about differences between two training loops: optimizers, their settings, random states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortap.compare.align.loop import LoopDifference, LoopDifferences
from tensortap.compare.align.side import Side
from tensortap.compare.judge.random_draws import draws
from tensortap.compare.matched import Matched
from tensortap.core.causes import Cause
from tensortap.core.records import Finding
from tensortap.mapping.outline import full_name

__all__ = ["describe_loop", "describe_settings", "loop_notes", "moved_parameters", "parameters_unseen"]

_UPDATES = frozenset({Cause.OPTIMIZER, Cause.PARAMETER_CHANGED})
_ONE_SIDED_GRADIENTS = frozenset(
    {Cause.MISSING_GRADIENT, Cause.MISSING_IN_CONTAINER, Cause.EXTRA_GRADIENT, Cause.EXTRA_IN_CONTAINER}
)
_OWN_CODE = frozenset({Cause.CONTAINER_CODE, Cause.HANDED_ON, Cause.OUTPUT})
_MOST = 3
_SHARED = "torch"
"""Generators of Python and NumPy are often left unseeded, and decide nothing about a model."""


def describe_loop(first: Finding, matched: Matched, explained: bool = False) -> str:
    """Return further sentences if a difference between the loops explains the first finding.

    explained: whether an attribute of its module explains it already.
    """
    loop = matched.settings.loop
    said = _in_words(_responsible(first, matched))
    if _may_be_drawn(first, loop, explained) and (differs := _random(loop, first.key.step)):
        said += f" The {differs}."
    return said


def describe_settings(matched: Matched, until: int) -> str:
    """Return a further sentence if an optimizer may have made other updates before a step."""
    return _in_words(matched.settings.loop.of_updates(until - 1))


def _in_words(differences: Sequence[LoopDifference]) -> str:
    words = [each.words for each in differences]
    more = f", and {len(words) - _MOST} more settings differ" if len(words) > _MOST else ""
    return f" The loops differ: {'; '.join(words[:_MOST])}{more}." if words else ""


def _may_be_drawn(first: Finding, loop: LoopDifferences, explained: bool) -> bool:
    """Whether the first finding may only be another random number: of the input, of a module that draws some, or of
    code that no attribute or argument explains, in a training that draws some."""
    if first.cause is Cause.INPUT or draws(first.cls):
        return True
    return first.cause in _OWN_CODE and not (first.arguments or explained) and loop.may_draw_random


def loop_notes(loop: LoopDifferences) -> list[str]:
    """Return a note for each difference between the loops."""
    notes = [each.words for each in loop.optimizer]
    if any(of.startswith(_SHARED) for of in loop.random):
        notes.append(_random(loop))
    return notes


def _responsible(first: Finding, matched: Matched) -> list[LoopDifference]:
    """Return the differences that may explain a wrong update, up to its step."""
    loop = matched.settings.loop
    until, name = first.key.step, full_name(first.key.module, first.key.path)
    if first.cause in _UPDATES:
        # a parameter that differs before a step was moved in an earlier one
        return loop.of_update(name, until - (first.cause is Cause.PARAMETER_CHANGED))
    before = [each for each in loop.optimizer if each.step <= until]
    if first.cause is Cause.STEP_GRADIENT:
        return [each for each in before if each.fact in ("scaler", "skipped") and each.concerns(name)]
    if first.cause in _ONE_SIDED_GRADIENTS and first.key.kind == "param_grad":
        return [each for each in before if each.fact in ("frozen", "parameters") and each.concerns(name)]
    if first.cause in _ONE_SIDED_GRADIENTS and first.module in loop.frozen_modules:
        return [each for each in before if each.fact == "frozen"]
    if parameters_unseen(matched.reference, first):
        return loop.of_module(first.module, until - 1)
    return loop.of_module(first.module, until) if moved_parameters(first, loop) else []


def parameters_unseen(side: Side, first: Finding) -> bool:
    """Whether a module may be wrong because of its parameters, which an earlier step changed unrecorded.

    The earlier step need not take part: `--step`, or `steps=` of a capture, may have left it out.
    """
    key = first.key
    if key.kind not in ("input", "output") or not first.inputs_matched or not key.step:
        return False
    if first.module not in side.module.words:  # a container of which nothing was recorded
        return False
    own = np.flatnonzero(side.module.codes == side.module.words.index(first.module))
    kinds = set(side.kind.at(own))
    if "param" in kinds:
        return False
    return first.module in side.frozen or "param_grad" in kinds or "param_grad" not in side.kind.words


def moved_parameters(first: Finding, loop: LoopDifferences) -> bool:
    """Whether a module may be wrong because of its parameters, which changed within the step."""
    key = first.key
    if key.kind not in ("input", "output") or not first.inputs_matched or not key.micro:
        return False
    return loop.moved_within_step(first.module, key.step, key.micro)


def _random(loop: LoopDifferences, until: int | None = None) -> str:
    """Say from where on the random states differ, up to a step; empty if they do not."""
    found = {of: step for of, step in loop.random.items() if until is None or step <= until}
    if not found:
        return ""
    first = min(found.values())
    names = ", ".join(of for of, step in found.items() if step == first)
    if first == loop.first_step:
        return f"random state differs before step {first} ({names})"
    return f"random state differs from step {first} on, before its first forward ({names})"

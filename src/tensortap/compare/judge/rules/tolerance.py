"""The tolerance of a pair, and those of many pairs in columns, by the rules of `table`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.pairs import Floats
from tensortap.compare.judge.rules import table
from tensortap.compare.judge.rules.columns import PairColumns
from tensortap.compare.judge.rules.conditions import KindIs
from tensortap.compare.judge.rules.evidence import JudgedPair
from tensortap.compare.judge.rules.margins import MOST_ASSUMED
from tensortap.compare.judge.rules.names import ACTIVATIONS, CAME_IN, ROUNDING, SAME_MASK
from tensortap.compare.judge.rules.table import Rule

__all__ = ["Tolerance", "Tolerances", "find_tolerance", "find_tolerances", "is_drowned"]

_AS_GIVEN = "rtol and atol as given"


class Tolerance(NamedTuple):
    """The relative error that a pair is allowed."""

    allowed: float
    rule: str
    """The name of the rule that allows it."""
    recorded: float
    """The error allowed without the rules for unrecorded values."""


def find_tolerance(pair: JudgedPair) -> Tolerance:
    if pair.row in pair.evidence.pairs.masks:
        return Tolerance(0.0, SAME_MASK, 0.0)
    if pair.policy.fixed:
        fixed = pair.policy.fixed_tolerance(pair.l2, int(pair.evidence.pairs.elements[pair.row]))
        return Tolerance(fixed, _AS_GIVEN, fixed)
    kind, allowed, name = pair.kind, pair.base, ROUNDING
    if kind == "param" and pair.evidence.pairs.is_set_differently(pair.row):  # it need not be noise of gradients
        allowed = max(allowed, pair.policy.passed_on(pair.incoming_state))
        return Tolerance(allowed, name, allowed)
    recorded = allowed
    for rule, is_certain in _rules_of(table.RULES, kind):
        if is_certain or rule.applies(pair):
            amount = rule.amount(pair)
            if amount > allowed:
                allowed, name = amount, rule.name
            if amount > recorded and not rule.for_unrecorded:
                recorded = amount
    return Tolerance(allowed, name, recorded)


class Tolerances(NamedTuple):
    """The tolerances of many pairs, see `Tolerance`."""

    allowed: Floats
    rules: npt.NDArray[np.int64]
    """The rule of each pair, as a number in `names`."""
    names: list[str]
    recorded: Floats


def find_tolerances(pairs: PairColumns) -> Tolerances | None:
    """Return the tolerances of pairs whose sources are all right; None if they must be judged one by one."""
    rules = [rule for rule, _ in _rules_of(table.RULES, pairs.kind)]
    if not all(rule.in_columns for rule in rules):
        return None
    allowed, recorded = pairs.base.copy(), pairs.base.copy()
    found = np.zeros(len(allowed), np.int64)
    for number, rule in enumerate(rules, 1):
        if rule.in_columns is None:
            continue
        amount = rule.in_columns(pairs)
        more = amount > allowed
        allowed[more], found[more] = amount[more], number
        if not rule.for_unrecorded:
            recorded = np.where(amount > recorded, amount, recorded)
    return Tolerances(allowed, found, [ROUNDING, *(rule.name for rule in rules)], recorded)


def is_drowned(kind: str, rule: str, error: float) -> bool:
    """Whether a pair is right only as far as the errors before it explain, and these are so large that it says nothing.

    Parameters are not meant: an optimizer turns the noise of a small gradient into a whole step.
    """
    return error > MOST_ASSUMED and rule in (CAME_IN, ACTIVATIONS) and kind not in ("param", "buffer")


class _Rules(NamedTuple):
    """All rules, and those of each kind of records, with whether the kind alone decides that they apply."""

    every: tuple[Rule, ...]
    of_kind: dict[str, tuple[tuple[Rule, bool], ...]]


_sorted_rules = _Rules((), {})


def _rules_of(every: tuple[Rule, ...], kind: str) -> tuple[tuple[Rule, bool], ...]:
    """Return the rules that may apply to a kind of records. Each pair asks, so the answers are kept."""
    global _sorted_rules
    if _sorted_rules.every is not every:
        _sorted_rules = _Rules(every, {})
    if kind not in _sorted_rules.of_kind:
        found = []
        for rule in every:
            by_kind = rule.applies if isinstance(rule.applies, KindIs) else None
            if by_kind is None or kind in by_kind.kinds:
                found.append((rule, by_kind is not None and by_kind.further is None))
        _sorted_rules.of_kind[kind] = tuple(found)
    return _sorted_rules.of_kind[kind]

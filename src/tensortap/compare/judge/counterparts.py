"""The position on the other side of a gradient that one side alone has.

A gradient counts as missing only if the other side has a place for it. Names show this within one tree, a mapping
shows it between two. A parameter that may be kept elsewhere, under another name or as a part of another one, has no
such place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tensortap.compare.align.distinct import distinct
from tensortap.compare.align.side import Ints, Side
from tensortap.compare.matched import Matched
from tensortap.core.records import Key
from tensortap.mapping.outline import full_name

__all__ = ["Counterparts", "Pass", "pass_of"]

Pass = tuple[int, int, int]
"""Rank, step and micro step."""


def pass_of(side: Side, row: int) -> Pass:
    return int(side.rank[row]), int(side.step[row]), int(side.pass_number[row])


@dataclass(frozen=True)
class Counterparts:
    """Answers for two sides whether each has a place for what the other has alone."""

    matched: Matched
    known: Collection[tuple[str, str]] | None = None
    """The candidate's own parameters, by the reference's module and the name there, if all of them are known."""

    # --- the reference's gradients ------------------------------------------------------------------------------------
    def expected(self, key: Key) -> bool:
        """Return whether the candidate should have a gradient that the reference has."""
        if key.kind == "param_grad" and self._candidate_knows(key.module, key.path):
            return True
        plan = self.matched.plan
        if plan is not None and key.module not in plan.module_matches.source_of:
            return False
        if key.kind == "param_grad" and (self.known is not None or self._has_no_place(0, key)):
            return False
        return not self._kept_elsewhere(key.module, self._candidates_alone)

    # --- the candidate's parameters -----------------------------------------------------------------------------------
    def extra(self, row: int) -> tuple[int, Key] | None:
        """Return rank and identity, in the reference's terms, of a parameter's gradient of the candidate.

        Return None if the reference did not run that pass, or may keep the parameter elsewhere.
        """
        side = self.matched.candidate
        where = self._passes.get(pass_of(side, row))
        own = side.key(row)
        if where is None or "~" in own.path:
            return None
        if (place := self._place_of(row)) is None:
            module = self._modules.get(own.module)
            if module is None or self._has_no_place(1, own) or self._kept_elsewhere(module, self._references_alone):
                return None
            place = module, own.path
        return where[0], own._replace(step=where[1], micro=where[2], module=place[0], path=place[1])

    def _place_of(self, row: int) -> tuple[str, str] | None:
        """The reference's own name of a parameter, if it knows the parameter, though not its gradient in this pass."""
        side, plan = self.matched.candidate, self.matched.plan
        if plan is not None:
            return (
                (side.module[row], side.path[row]) if side.module[row] in plan.module_matches.target.modules else None
            )
        place = self._modules.get(side.module[row], side.module[row]), side.path[row]
        return place if place in self._references_state else None

    # --- both ---------------------------------------------------------------------------------------------------------
    def _candidate_knows(self, module: str, path: str) -> bool:
        """Whether the candidate has the parameter, though not its gradient in every pass."""
        if self.known is not None:
            return (module, path) in self.known
        plan = self.matched.plan
        if plan is not None:
            name = full_name(module, path)
            return name in plan.tensor_matches.conversions and not self._is_tied(0, name)
        return (module, path) in self._candidates_state

    def _has_no_place(self, number: int, key: Key) -> bool:
        """Whether the other side is known to hold a side's (0 reference, 1 candidate) parameter otherwise."""
        plan = self.matched.plan
        if plan is None:
            return False
        name = full_name(key.module, key.path)
        return (
            name in plan.tensor_matches.refused[number]
            or name in plan.tensor_matches.ignored[number]
            or self._is_tied(number, name)
        )

    def _is_tied(self, number: int, name: str) -> bool:
        """Whether one of the sides has its gradient only as a part of a sum."""
        plan = self.matched.plan
        assert plan is not None
        if number == 1:
            return name in plan.ties[0] or name in plan.ties[1].values()
        return name in plan.ties[1] or name in plan.tensor_matches.shared(0, plan.ties[1])

    def _kept_elsewhere(self, module: str, alone: Iterable[tuple[str | None, str]]) -> bool:
        """Whether one of the parameters that the other side has alone may be what a module of the reference lacks.

        Each is given by its module in the reference's names, None if it has none there, and by its module's own name.
        """
        plan = self.matched.plan
        for there, own in alone:
            if there is not None and _within(there, module):
                return True
            if there is None and (plan is None or _within(own, plan.module_matches.source_of.get(module, module))):
                return True
        return False

    @cached_property
    def _candidates_alone(self) -> set[tuple[str | None, str]]:
        """Modules whose parameters' gradients only the candidate has, in passes that both have."""
        side, rows = self.matched.candidate, self.matched.alignment.only_candidate
        own = [side.key(row).module for row in _parameters(side, rows, self._passes) if self._place_of(row) is None]
        return {(self._modules.get(module), module) for module in own}

    @cached_property
    def _references_alone(self) -> set[tuple[str | None, str]]:
        side, rows = self.matched.reference, self.matched.alignment.only_reference
        keys = [side.key(row) for row in _parameters(side, rows, set(self._passes.values()))]
        ran = set(self._modules.values())
        alone = {key.module for key in keys if not self._candidate_knows(key.module, key.path)}
        if self.matched.plan is not None:
            return {(module, module) for module in alone}
        return {(module if module in ran else None, module) for module in alone}

    @cached_property
    def _modules(self) -> dict[str, str]:
        """The reference's names of the candidate's modules."""
        if self.matched.plan is not None:
            return self.matched.plan.modules
        left, right, alignment = self.matched.reference, self.matched.candidate, self.matched.alignment
        pairs = distinct(right.module.codes[alignment.candidate], left.module.codes[alignment.reference])
        return {right.module.words[theirs]: left.module.words[ours] for theirs, ours in pairs}

    @cached_property
    def _passes(self) -> dict[Pass, Pass]:
        """Passes that both sides have: the candidate's identity → the reference's."""
        left, right, alignment = self.matched.reference, self.matched.candidate, self.matched.alignment
        sides = (right, alignment.candidate), (left, alignment.reference)
        columns = [getattr(side, name)[rows] for side, rows in sides for name in ("rank", "step", "pass_number")]
        return {(one[0], one[1], one[2]): (one[3], one[4], one[5]) for one in distinct(*columns)}

    @cached_property
    def _references_state(self) -> set[tuple[str, str]]:
        return _state(self.matched.reference)

    @cached_property
    def _candidates_state(self) -> set[tuple[str, str]]:
        own = _state(self.matched.candidate)
        return {(self._modules[module], path) for module, path in own if module in self._modules}


def _parameters(side: Side, rows: Ints, passes: Collection[Pass]) -> list[int]:
    rows = rows[side.kind.among(("param_grad",))[rows]] if len(rows) else rows
    return [row for row in rows.tolist() if "~" not in side.path[row] and pass_of(side, row) in passes]


def _state(side: Side) -> set[tuple[str, str]]:
    rows = np.flatnonzero(side.kind.among(("param", "param_grad")))
    return set(zip(side.module.at(rows), side.path.at(rows), strict=True))


def _within(module: str, other: str) -> bool:
    """Whether a module is another one or a part of it."""
    return module == other or not other or module.startswith(f"{other}.")

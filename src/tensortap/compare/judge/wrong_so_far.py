"""The records that are wrong so far. From these, an error may reach a record whose sources were not recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import pairwise

from tensortap.compare.judge.structure import Structure

__all__ = ["WrongSoFar"]


class WrongSoFar:
    """Kinds of the wrong records by rank and step, while pairs are judged in execution order."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self.gradients = 0
        """Number of gradients of parameters that are wrong."""
        self._kinds: dict[tuple[int, int], set[str]] = defaultdict(set)
        self._nonfinite_kinds: dict[tuple[int, int], set[str]] = defaultdict(set)

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def add(self, row: int, is_nonfinite: bool) -> None:
        rank, step, _ = self._structure.scope[row]
        kind = self._structure.kind[row]
        self.gradients += kind == "param_grad"
        if is_nonfinite:
            self._nonfinite_kinds[rank, step].add(kind)
        self._kinds[rank, step].add(kind)

    def may_reach(self, row: int) -> bool:
        """Whether a record with unknown sources comes after something wrong: then it is not a birth. Inputs of the
        model, and parameters at first, come from outside."""
        kind = self._structure.kind[row]
        if kind == "input" and not self._structure.module[row]:
            return False
        same_step = kind not in ("param", "buffer") and self._structure.scope[row][:2] in self._kinds
        return same_step or self._came_through_parameters(row, self._kinds)

    def nonfinite_may_reach(self, row: int) -> bool:
        """Whether NaN or Inf may have come from the step before through unrecorded parameters."""
        return self._came_through_parameters(row, self._nonfinite_kinds)

    def _came_through_parameters(self, row: int, bad: Mapping[tuple[int, int], Collection[str]]) -> bool:
        """Whether something bad, such as a NaN, may have come from the step before through unrecorded parameters: by
        way of their gradients, if these were recorded."""
        rank, step, _ = self._structure.scope[row]
        before = (rank, self._step_before.get((rank, step), -1))
        kinds = bad.get(before, ())
        if not kinds or "param" in self._structure.kinds_in_step[rank, step]:
            return False
        return "param_grad" in kinds or "param_grad" not in self._structure.kinds_in_step[before]

    @cached_property
    def _step_before(self) -> dict[tuple[int, int], int]:
        steps = sorted(self._structure.kinds_in_step)
        return {step: before[1] for before, step in pairwise(steps) if before[0] == step[0]}

"""The pairs of a run whose modules ran on the reference's own inputs, as judged, and what one side alone recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.findings import FindingBuilder
from tensortap.compare.judge.isolation import Isolation
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure
from tensortap.core.records import WRONG_STATUSES, Key

__all__ = ["CheckedPairs"]


@dataclass(frozen=True)
class CheckedPairs:
    """The judged pairs of a check. Rows are numbers of pairs."""

    judgement: Judgement
    structure: Structure
    isolation: Isolation
    forced: npt.NDArray[np.bool_]
    """By pair: whether its value was replaced by the reference's after it was measured."""
    used_inside: Collection[int]
    """The pairs of `Isolation.used_inside`."""
    one_gradient: Mapping[int, Sequence[int]]
    """By pair: all pairs of the same gradient, the innermost call's first."""
    only_reference: Collection[Key]
    """Records that only the reference has."""
    only_candidate: Collection[Key]
    """Records that only the candidate has."""
    explained: bool
    """Whether a finding reports where the gradients among these end."""
    untied: Collection[tuple[str, str]] = ()
    """Parameters that are tied on one side alone, by module and name there."""

    @classmethod
    def of(
        cls,
        builder: FindingBuilder,
        isolation: Isolation,
        rows: npt.NDArray[np.int64],
        only_reference: Collection[Key],
        only_candidate: Collection[Key],
        explained: bool,
        untied: Collection[tuple[str, str]] = (),
    ) -> CheckedPairs:
        """Return the pairs of a check.

        rows: the candidate's rows of the pairs.
        only_reference, only_candidate: records that one side alone has.
        explained: whether another finding reports where gradients that only the reference has end.
        untied: parameters that are tied on one side alone.
        """
        numbers = rows.tolist()
        forced = np.array([row in isolation.forced for row in numbers], bool)
        used_inside = {pair for pair, row in enumerate(numbers) if row in isolation.used_inside}
        groups = _pairs_of_one_gradient(isolation, numbers)
        of_pairs = builder.judgement, builder.structure, isolation, forced, used_inside, groups
        return cls(*of_pairs, only_reference, only_candidate, explained, untied)

    def is_wrong(self, row: int) -> bool:
        return self.judgement.status[row] in WRONG_STATUSES

    def reader(self, row: int) -> str | None:
        """Return the module that uses the parameters of one that is never called itself."""
        calls = self.structure.users_of_own(row)
        return calls[0].module if calls and calls[0].module != self.structure.module[row] else None

    def outputs_without_gradient(self, call: CallRows) -> Iterator[str]:
        """Yield the paths of a call's outputs of which only the reference has the gradient."""
        _, step, micro = call.scope
        for path in (self.structure.path[output] for output in call.of("output")):
            if Key(step, micro, "backward", call.module, call.number, "grad_output", path) in self.only_reference:
                yield path

    def find_misleader(self, tensors: Collection[int], users: Collection[CallRows]) -> str | None:
        """Return the code that gave a user something else in the place of these tensors: it sends no gradient to them,
        or a user of something else does."""
        for user in users:
            if any(self.structure.tensor[row] in tensors and self.is_wrong(row) for row in user.of("input")):
                return self.isolation.caller(user)
        return None

    @property
    def has_extra_gradients(self) -> bool:
        """Whether parameters get gradients in the candidate alone: a finding of its own reports them."""
        return any(key.kind == "param_grad" for key in self.only_candidate)

    def calls_in_pass(self, row: int, module: str) -> Sequence[CallRows]:
        """Return the calls of a module in the pass of a row."""
        return self.structure.calls_of_module.get((self.structure.scope[row], module), ())


def _pairs_of_one_gradient(isolation: Isolation, numbers: Sequence[int]) -> dict[int, Sequence[int]]:
    """Return by pair all pairs of the very same gradient, the innermost call's first."""
    pair_of = {row: pair for pair, row in enumerate(numbers)} if isolation.same else {}
    groups = [[pair_of[row] for row in rows if row in pair_of] for rows in isolation.same]
    return {pair: group for group in groups for pair in group}

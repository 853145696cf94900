"""From judgements to findings: where a wrong value was born, why, and which module to inspect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tensortap.compare.judge.attribution import Attribution, attribute
from tensortap.compare.judge.causes import cause_of, is_within
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.lost_masks import LostMask, innermost_without, outermost_without
from tensortap.compare.judge.steps.calls import CallRows, Spot
from tensortap.compare.judge.structure import Structure
from tensortap.core.arguments import ArgumentDifference
from tensortap.core.causes import Cause
from tensortap.core.records import RIGHT_STATUSES, WRONG_STATUSES, Difference, Finding, Key

__all__ = ["FindingBuilder", "find_births", "first_wrong_pair"]

_MOST = 1000


@dataclass(frozen=True)
class FindingBuilder:
    """Builds findings from judged pairs. The functions take the number of a pair."""

    judgement: Judgement
    structure: Structure
    key_of: Callable[[int], Key]
    class_of: Callable[[int], str]
    difference_of: Callable[[int], Difference | None]
    candidate_names: Mapping[str, str]
    """The candidate's names of modules, where they differ."""
    argument_differences: Callable[[int], tuple[ArgumentDifference, ...]]
    """The plain arguments in which the two calls of a pair differ."""
    maker_of: Callable[[int], str | None] = lambda pair: None
    """The module that made an argument, where the code of the container is known not to have."""
    lost_masks: Mapping[Spot, LostMask] = field(default_factory=dict)
    """Calls that one side alone gives a mask."""
    zeros_of: Callable[[int], tuple[int, int]] = lambda pair: (0, 0)
    """The number of zeros of a pair, in the reference and in the candidate."""
    isolated: bool = False
    """Whether every module ran on the reference's own inputs."""
    checkpoints: bool = False
    """Whether both sides are checkpoints."""

    def births(self) -> list[int]:
        """Return the rows of all births, the earliest first."""
        structure = self.structure
        return sorted(self.judgement.born, key=lambda row: (structure.scope[row][1], structure.seq[row]))

    def module_to_blame(self, row: int, attribution: Attribution) -> str:
        return self.structure.module[row] if attribution.container is None else attribution.container

    def build(self, row: int, attribution: Attribution, born: int) -> Finding:
        """Build the finding of a row. `born` is the row of the birth, which may be the same tensor at another call."""
        judgement = self.judgement
        found = Finding(
            key=self.key_of(row),
            row=row,
            rank=self.structure.scope[row][0],
            cls=self.class_of(row),
            status=judgement.status[row],
            cause=self._cause(row, attribution),
            difference=self.difference_of(row),
            tolerance=float(judgement.tolerance[row]),
            row_tolerance=float(judgement.row_tolerance[row]),
            rule=judgement.rule[row],
            inputs_matched=attribution.inputs_matched,
            unjudged=tuple(self.key_of(source) for source in attribution.unjudged),
            container=self._container(row, attribution),
            inputs_rel_l2=judgement.sources_error.get(born, float("nan")),
            counterpart=self.candidate_names.get(self.module_to_blame(row, attribution)),
            arguments=self._arguments(row, attribution),
        )
        unmasked = self.unmasked_call(row, attribution)
        if unmasked is None or unmasked.parent is None:
            return found
        mask, caller = self.lost_masks[unmasked.spot], unmasked.parent.module
        key = found.key._replace(
            phase="forward", module=unmasked.module, call=unmasked.number, kind="input", path=mask.path
        )
        counterpart = self.candidate_names.get(caller)
        return replace(found, key=key, cause=mask.cause, container=caller, counterpart=counterpart, arguments=())

    def unmasked_call(self, row: int, attribution: Attribution) -> CallRows | None:
        """Return the outermost call that one side alone gave a mask, if that explains a wrong row."""
        if not self.lost_masks or self.structure.kind[row] in ("param", "buffer"):
            return None
        spot = self.structure.scope[row], self.module_to_blame(row, attribution)
        calls = (call for call in self.structure.calls_of_module.get(spot, ()) if call.spot in self.lost_masks)
        return next((outermost_without(call, self.lost_masks) for call in calls if self._needs_mask(call)), None)

    def _needs_mask(self, call: CallRows) -> bool:
        """Whether a call that lacks a mask is wrong because of that: something inside that would read it is, and
        nothing that lacks the same mask is right, as an attention that knows by itself that it is causal."""
        lost = self.lost_masks
        content = lost[call.spot].content
        same = (self._call_at(spot) for spot, mask in lost.items() if spot[0] == call.scope and mask.content == content)
        without = [each for other in same if other is not None for each in innermost_without(other, lost)]
        if any(self._is_right(each) for each in without):
            return False
        return not all(self._is_right(each) for each in innermost_without(call, lost))

    def _call_at(self, spot: Spot) -> CallRows | None:
        calls = self.structure.calls_of_module.get(spot[:2], ())
        return next((call for call in calls if call.number == spot[2]), None)

    def _is_right(self, call: CallRows) -> bool:
        """Whether all that a call returns, and hands to the modules inside, is right."""
        made = [*call.of("output"), *(row for child in call.children for row in child.of("input"))]
        return bool(made) and all(self.judgement.status[row] in RIGHT_STATUSES for row in made)

    def _cause(self, row: int, attribution: Attribution) -> Cause:
        container = self._container(row, attribution)
        return cause_of(
            row, attribution, container, self.structure, isolated=self.isolated, checkpoints=self.checkpoints
        )

    def _container(self, row: int, attribution: Attribution) -> str | None:
        return attribution.container if attribution.container != self.structure.module[row] else None

    def _arguments(self, row: int, attribution: Attribution) -> tuple[ArgumentDifference, ...]:
        """Return the plain arguments in which the call of the module to blame differs."""
        structure, module = self.structure, self.module_to_blame(row, attribution)
        kind, own = structure.kind[row], structure.call_of(row)
        if kind in ("param", "buffer", "step_grad") or (kind == "input" and attribution.container is None):
            return ()  # no call made it
        near = [call for call in (own, own and own.parent) if call is not None and call.module == module]
        calls = near[:1] or structure.calls_of_module.get((structure.scope[row], module), [])
        firsts = (next(iter(call.rows.values()))[0] for call in calls)
        return next((found for first in firsts if (found := self.argument_differences(first))), ())


def find_births(builder: FindingBuilder) -> list[Finding]:
    """Return a finding for each birth, the earliest first."""
    structure = builder.structure
    found: dict[int, Finding] = {}
    blamed: dict[tuple[int, int, int], list[str]] = {}
    for born in builder.births()[:_MOST]:
        at_root = structure.at_root(born) if structure.kind[born] == "grad_output" else None
        row = born if at_root is None else at_root
        attribution = attribute(row, structure, builder.judgement)
        if (maker := builder.maker_of(row)) is not None:
            attribution = Attribution(maker, True, hands_on=structure.kind[row] == "input")
        if structure.kind[row] == "grad_output":
            # The gradient that a module sends back to its container is recorded only later: that code is not to blame.
            module = builder.module_to_blame(row, attribution)
            known = blamed.setdefault(structure.scope[row], [])
            if any(is_within(other, module) for other in known):
                continue
            known.append(module)
        found[row] = builder.build(row, attribution, born)
    return list(found.values())


def first_wrong_pair(builder: FindingBuilder) -> list[Finding]:
    """Return a finding for the first wrong row; an empty list if none is wrong.

    For comparisons in which no birth was found: they must not be called a match.
    """
    structure = builder.structure
    wrong = np.flatnonzero(builder.judgement.having(*WRONG_STATUSES)).tolist()
    if not wrong:
        return []
    first = min(wrong, key=lambda row: (structure.scope[row][1], structure.seq[row]))
    return [builder.build(first, attribute(first, structure, builder.judgement), first)]

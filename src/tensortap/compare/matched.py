"""Two runs side by side: how their records are aligned, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.call_patterns import OtherCalls
from tensortap.compare.align.calls import CallDifferences
from tensortap.compare.align.operators import OperatorAlignment
from tensortap.compare.align.settings import SettingDifferences
from tensortap.compare.align.side import Bools, Side
from tensortap.compare.align.splits import OtherSplits
from tensortap.compare.join.scaling import NO_SCALING, Scaling
from tensortap.compare.join.shares import find_rounded_shares
from tensortap.compare.judge.findings import FindingBuilder
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.lost_masks import LostMask, find_lost_masks
from tensortap.compare.judge.rules.by_design import Allowance, find_allowances
from tensortap.compare.judge.steps.calls import Spot
from tensortap.compare.judge.structure import Structure
from tensortap.compare.measure.edges import has_edges
from tensortap.compare.measure.gelu import other_gelus_between
from tensortap.compare.measure.measures import Measures
from tensortap.compare.translate.certainty import CERTAIN, Doubts, Levels, certain_modules, levels, paired_by_state
from tensortap.compare.translate.fused import Fusions
from tensortap.compare.translate.mapped import (
    frameworks_differ,
    other_names,
)
from tensortap.compare.translate.translated import Translated
from tensortap.mapping.model_mapping import ModelMapping
from tensortap.mapping.outline import full_name

__all__ = ["Matched"]


@dataclass(frozen=True)
class Matched:
    """Two sides, aligned and measured."""

    reference: Side
    candidate: Side
    alignment: Alignment
    measures: Measures
    plan: ModelMapping | None = None
    """How the candidate's names and layouts were mapped; None if they were not."""
    repeated: Sequence[int] = ()
    """Pairs that differ in shape only, because one side repeats a value that the other broadcasts."""
    fusions: Fusions = field(default_factory=Fusions)
    """Modules of one side that include what the other side has in separate modules."""
    splits: OtherSplits = field(default_factory=lambda: OtherSplits({}))
    """Steps that the sides split into other numbers of micro batches."""
    patterns: OtherCalls = field(default_factory=lambda: OtherCalls({}))
    """Modules that the sides call another number of times, on other parts of the same."""
    scaling: Scaling = NO_SCALING
    """The factor between the gradients of sides that split a batch over other numbers of ranks."""
    operators: OperatorAlignment = field(default_factory=OperatorAlignment)
    """How operators below the modules were aligned."""

    @cached_property
    def allowances(self) -> dict[int, Allowance]:
        """Pairs that are allowed more than others, because the frameworks or the layouts differ by design."""
        shares = find_rounded_shares(self.reference, self.candidate, self.alignment)
        if self.plan is None or not isinstance(self.candidate, Translated):
            return shares
        return shares | find_allowances(self.reference, self.candidate, self.alignment, self.plan)

    @cached_property
    def has_edges(self) -> Bools:
        """Whether elements of each pair are at the edge of their dtype's range; see `edges`."""
        return has_edges(self.reference, self.candidate, self.alignment)

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The candidate's names of the reference's modules, where they differ."""
        return {} if self.plan is None else other_names(self.plan)

    @cached_property
    def calls(self) -> CallDifferences:
        """The plain arguments in which the calls of the two sides differ."""
        return CallDifferences(self.reference, self.candidate, self.alignment, mapped=self.plan is not None)

    @cached_property
    def settings(self) -> SettingDifferences:
        """The attributes and ties in which the modules of the two sides differ."""
        comparable = not frameworks_differ(self.reference.run, self.candidate.run)
        return SettingDifferences(self.reference, self.candidate, self.alignment, comparable)

    def reference_array(self, pair: int) -> npt.NDArray[Any] | None:
        """Return the reference's tensor of a pair; None if it was not kept."""
        row = int(self.alignment.reference[pair])
        return self.reference.array(row) if self.reference.kept[row] else None

    def _class(self, pair: int) -> str:
        """Return the class of a pair's module."""
        row = int(self.alignment.reference[pair])
        key = self.fusions.key(self.reference.key(row))
        if self.plan is None or key.module == self.reference.module[row]:
            return self.reference.cls[row]
        return self.plan.module_matches.target.modules[key.module].cls

    def _zeros(self, pair: int) -> tuple[int, int]:
        ours, theirs = self.alignment.reference[pair], self.alignment.candidate[pair]
        return int(self.reference.zeros[ours]), int(self.candidate.zeros[theirs])

    def other_gelus(self, structure: Structure) -> set[int]:
        """Return the outputs that one side computes by a GELU with erf and the other by one with tanh."""
        differ = ~self.measures.equal & ~self.measures.reshaped
        return other_gelus_between(self.reference, self.candidate, self.alignment, structure, differ)

    def is_set_differently(self, pair: int) -> bool:
        """Whether the optimizers are known to have updated a pair of parameters with other settings so far."""
        if not self.settings.loop.optimizer:
            return False
        key = self.reference.key(int(self.alignment.reference[pair]))
        found = self.settings.loop.of_update(full_name(key.module, key.path), key.step - (not key.call))
        return any(not each.may_compute_same for each in found)

    def moved_within_step(self, pair: int) -> bool:
        """Whether the parameters of a pair's module changed between the micro steps of its step, before it was made."""
        key = self.reference.key(int(self.alignment.reference[pair]))
        return bool(key.micro) and self.settings.loop.moved_within_step(key.module, key.step, key.micro)

    def is_orthogonalized(self, pair: int) -> bool:
        """Whether the optimizer makes the steps of a pair of parameters orthogonal."""
        if not (names := self.settings.loop.orthogonalized):
            return False
        key = self.reference.key(int(self.alignment.reference[pair]))
        return full_name(key.module, key.path) in names

    def levels(self) -> Levels:
        """Return how certain each pair is."""
        if self.plan is None:
            return np.full(len(self.alignment.reference), CERTAIN, np.int8)
        return levels(self.reference, self.candidate, self.alignment, self.measures, self.plan)

    @cached_property
    def is_certain(self) -> Callable[[str], bool]:
        """Says of a module of the reference whether it is certain which one of the candidate it is."""
        if self.plan is None:
            return lambda module: True
        return certain_modules(self.reference, self.alignment, self.measures, self.plan)

    def paired_by_state(self, doubts: Doubts) -> dict[str, str]:
        """Return modules that their parameters show to be paired wrongly: the reference's name by the candidate's."""
        if self.plan is None or not isinstance(self.candidate, Translated):
            return {}
        return paired_by_state(self.reference, self.candidate.own, self.plan, doubts.modules)

    def structure(self) -> Structure:
        """Return how the pairs are related."""
        return Structure(self.reference, self.alignment.reference, self.fusions.renamed)

    def _lost_masks(self) -> Mapping[Spot, LostMask]:
        if self.plan is not None:
            return {}
        return find_lost_masks(self.reference, self.candidate, self.alignment, self.settings.are_same)

    def finding_builder(self, judgement: Judgement, structure: Structure, isolated: bool = False) -> FindingBuilder:
        """Return what builds findings from the judged pairs."""
        side, rows = self.reference, self.alignment.reference
        return FindingBuilder(
            judgement,
            structure,
            key_of=lambda pair: self.fusions.key(side.key(int(rows[pair]))),
            class_of=self._class,
            difference_of=self.measures.difference,
            candidate_names=self.names,
            argument_differences=self.calls.of,
            maker_of=lambda pair: self.fusions.maker(side.key(int(rows[pair]))),
            lost_masks=self._lost_masks(),
            zeros_of=self._zeros,
            isolated=isolated,
            checkpoints=side.run.is_checkpoint and self.candidate.run.is_checkpoint,
        )

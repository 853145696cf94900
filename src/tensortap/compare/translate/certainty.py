"""The certainty of pairs whose modules were matched by the structure of the module trees.

Two records that need not be the same may differ without a mistake. So a guessed pair carries no verdict: it counts if
values or names confirm it, or if the same two tensors are a pair that is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.structure import Structure
from tensortap.compare.measure.measures import Measures
from tensortap.core.records import GRADIENT_KINDS, RIGHT_STATUSES, WRONG_STATUSES, display_name
from tensortap.mapping.model_mapping import ModelMapping

__all__ = [
    "CERTAIN",
    "DOUBTFUL",
    "NO_DOUBTS",
    "PLAUSIBLE",
    "Doubts",
    "Levels",
    "certain_modules",
    "judge_certain",
    "levels",
    "paired_by_state",
]

DOUBTFUL, PLAUSIBLE, CERTAIN = 0, 1, 2
Levels = npt.NDArray[np.int8]
GUESSED = "paired by structure alone, and nothing confirms it"
_NAMED = ("root", "rename", "rule", "same name", "values")
_SAME = 1e-3
_STATE = 1e-5
_FEW = 3
_FLOWING = ("input", "output")


def levels(reference: Side, candidate: Side, alignment: Alignment, measures: Measures, plan: ModelMapping) -> Levels:
    """Return for each pair whether it is certain, plausible or doubtful."""
    known = _ModuleCertainty(reference, alignment, measures, plan)
    rows = alignment.reference
    words = np.array([known.level(word) for word in reference.module.words], np.int8)
    found: Levels = words[reference.module.codes[rows]] if len(rows) else np.empty(0, np.int8)
    # A container that returns another shape has its boundary elsewhere.
    found[(found == PLAUSIBLE) & measures.reshaped] = DOUBTFUL
    if not len(rows) or (found == CERTAIN).all():
        return found
    tensors = np.stack([reference.tensor_id[rows], candidate.tensor_id[alignment.candidate]])
    same = np.unique(tensors, axis=1, return_inverse=True)[1].reshape(-1)
    found[np.isin(same, same[found == CERTAIN])] = CERTAIN
    return found


def certain_modules(
    reference: Side, alignment: Alignment, measures: Measures, plan: ModelMapping
) -> Callable[[str], bool]:
    """Return a function that says whether the counterpart of a module of the reference is certain."""
    return _ModuleCertainty(reference, alignment, measures, plan).is_certain


class _ModuleCertainty:
    """Finds what confirms the pairs of modules."""

    def __init__(self, reference: Side, alignment: Alignment, measures: Measures, plan: ModelMapping) -> None:
        self._side, self._rows, self._measures = reference, alignment.reference, measures
        self._matches = plan.module_matches

    def level(self, made: str) -> int:
        matches = self._matches
        if made not in matches.source_of or matches.how[made] in _NAMED:
            return CERTAIN
        given = matches.source_of[made]
        named_alike = made.rpartition(".")[2] == given.rpartition(".")[2] and not given.rpartition(".")[2].isdecimal()
        if matches.target.children(made) or matches.source.children(given):
            return CERTAIN if named_alike else PLAUSIBLE if matches.same_structure(made) else DOUBTFUL
        if made in self._with_same_state:
            return CERTAIN
        own = bool(matches.target.modules[made].tensors)
        if own and named_alike:
            return CERTAIN
        # Without weights, only the order confirms it; with weights, unless similar modules are given the same tensor.
        return CERTAIN if (own or not self._any_tensors) and self._in_order(made) else DOUBTFUL

    def is_certain(self, made: str) -> bool:
        """Whether names, order or state confirm a pair, or outputs that agree."""
        return self.level(made) == CERTAIN or made in self._with_same_output

    def _in_order(self, made: str) -> bool:
        """Whether both sides have equally many such modules, one after the other, so that their order decides."""
        group = self._matches.lookalikes.get(made)
        if group is None:
            return False
        given = [tensor for name in group for tensor in self._inputs.get(name, ())]
        return len(given) == len(set(given))

    @cached_property
    def _any_tensors(self) -> bool:
        return any(module.tensors for module in self._matches.target.modules.values())

    @cached_property
    def _with_same_state(self) -> set[str]:
        """Modules with a parameter or buffer that agrees and is not constant, as that of a new norm is."""
        found = self._agreeing("param", "buffer") & (self._side.call[self._rows] == 0)
        return set(self._side.module.at(self._rows[found]))

    @cached_property
    def _with_same_output(self) -> set[str]:
        """Modules whose outputs all agree and are not constant."""
        side, rows = self._side, self._rows
        outputs = side.kind.among(("output",))[rows] if len(rows) else np.empty(0, bool)
        agreeing = self._agreeing("output")
        return set(side.module.at(rows[agreeing])) - set(side.module.at(rows[outputs & ~agreeing]))

    def _agreeing(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Return, for each pair, whether it has one of these kinds, agrees, and is not constant."""
        rows, measures = self._rows, self._measures
        if not len(rows):
            return np.empty(0, bool)
        near = measures.equal | (measures.rel_l2 <= _SAME)
        various = measures.sides["reference"]["std"] > 0
        found: npt.NDArray[np.bool_] = self._side.kind.among(kinds)[rows] & near & various
        return found

    @cached_property
    def _inputs(self) -> dict[str, set[int]]:
        """Numbers of the tensors that modules were given."""
        side, rows = self._side, self._rows
        inputs = rows[side.kind.among(("input",))[rows]] if len(rows) else rows
        found: dict[str, set[int]] = {}
        for module, tensor in zip(side.module.at(inputs), side.tensor_id[inputs].tolist(), strict=True):
            found.setdefault(module, set()).add(tensor)
        return found


@dataclass(frozen=True)
class Doubts:
    """Modules that were paired by structure alone and differ."""

    modules: Sequence[str] = ()
    """The reference's names."""
    undecided: bool = False
    """Whether nothing else differs, and no certain pair confirms that all is right."""

    def words(self, plan: ModelMapping) -> str:
        """Name these modules, and say what to do."""
        pairs = [
            f"{display_name(name)} and {display_name(plan.module_matches.source_of[name])}" for name in self.modules
        ]
        few = "; ".join(pairs[:_FEW]) + (f"; and {len(pairs) - _FEW} more" if len(pairs) > _FEW else "")
        return f"paired by structure alone, and different: {few}. If they belong together, say so with --map"


NO_DOUBTS = Doubts()


def judge_certain(
    pairs: Pairs, structure: Structure, found: Callable[[], Levels], judge: Callable[[Pairs], Judgement]
) -> tuple[Judgement, Doubts]:
    """Judge so that no guessed pair carries the verdict alone. `found` returns how certain each pair is.

    If certain pairs diverge too, a plausible one may be the first, such as a container whose own code is wrong. If none
    does, guessed pairs are left unjudged.
    """
    judgement = judge(pairs)
    if not judgement.born or (known := found()).min(initial=CERTAIN) == CERTAIN:
        return judgement, NO_DOUBTS
    unsure = [row for row in judgement.born if known[row] < CERTAIN]
    if not unsure:
        return judgement, NO_DOUBTS
    certain = _without(pairs, judgement, known < CERTAIN, judge)
    if certain.born:
        lead = _without(pairs, judgement, known == DOUBTFUL, judge)
        doubtful = [structure.module[row] for row in unsure if known[row] == DOUBTFUL]
        return lead, Doubts(list(dict.fromkeys(doubtful)))
    modules = list(dict.fromkeys(structure.module[row] for row in unsure))
    return certain, Doubts(modules, undecided=not _confirmed(certain, structure, known, unsure))


def paired_by_state(reference: Side, candidate: Side, plan: ModelMapping, modules: Sequence[str]) -> dict[str, str]:
    """Pair these modules of the reference and their counterparts anew, by parameters that agree.

    Return the reference's name by the candidate's; empty unless all modules with parameters are paired so. Norms and
    sums do not depend on the layout.
    """
    of_made = plan.module_matches.source_of
    ours = {name: marks for name in modules if (marks := _fingerprint(reference, name))}
    theirs = {of_made[name]: _fingerprint(candidate, of_made[name]) for name in ours}
    found: dict[str, str] = {}
    for name, marks in ours.items():
        same = [other for other, others in theirs.items() if _agree(marks, others)]
        if len(same) != 1 or same[0] in found:
            return {}
        found[same[0]] = name
    return found if any(of_made[made] != given for given, made in found.items()) else {}


def _fingerprint(side: Side, module: str) -> list[tuple[int, float, float]]:
    """Return size, norm and mean of a module's parameters before the first step: they do not depend on the layout."""
    if module not in side.module.words:
        return []
    own = np.flatnonzero(side.module.codes == side.module.words.index(module))
    own = own[side.kind.among(("param",))[own] & (side.call[own] == 0)]
    first = own[side.step[own] == side.step[own].min()] if len(own) else own
    columns = (side.elements[first].tolist(), side.l2[first].tolist(), side.mean[first].tolist())
    return sorted(zip(*columns, strict=True))


def _agree(ours: Sequence[tuple[int, float, float]], theirs: Sequence[tuple[int, float, float]]) -> bool:
    if [size for size, _, _ in ours] != [size for size, _, _ in theirs]:
        return False
    return all(
        abs(norm - norm_2) <= _STATE * norm and abs(mean - mean_2) * size**0.5 <= _STATE * norm
        for (size, norm, mean), (_, norm_2, mean_2) in zip(ours, theirs, strict=True)
    )


def _without(
    pairs: Pairs, judgement: Judgement, guessed: npt.NDArray[np.bool_], judge: Callable[[Pairs], Judgement]
) -> Judgement:
    """Judge without the guessed pairs that differ. Other pairs may differ then, so repeat."""
    left = np.zeros(len(guessed), bool)
    while (wrong := guessed & ~left & judgement.having(*WRONG_STATUSES)).any():
        left |= wrong
        error = np.where(left, np.nan, pairs.error)
        known = replace(pairs, error=error, nonfinite=pairs.nonfinite & ~left, reshaped=pairs.reshaped & ~left)
        judgement = judge(known)
    for row in np.flatnonzero(left).tolist():
        judgement.rule[row] = GUESSED
    return judgement


def _confirmed(judgement: Judgement, structure: Structure, known: Levels, doubtful: Sequence[int]) -> bool:
    """Whether a certain pair that agrees follows each doubtful one that differs: a mistake would have changed it."""
    last: dict[bool, tuple[int, int]] = {}
    for row in np.flatnonzero(known == CERTAIN).tolist():
        kind = structure.kind[row]
        if judgement.status[row] in RIGHT_STATUSES and kind in (*_FLOWING, *GRADIENT_KINDS):
            when = (structure.scope[row][1], structure.seq[row])
            last[kind in GRADIENT_KINDS] = max(last.get(kind in GRADIENT_KINDS, when), when)
    whens = ((structure.kind[row] in GRADIENT_KINDS, structure.scope[row][1], structure.seq[row]) for row in doubtful)
    return all((step, seq) < last.get(backward, (-1, -1)) for backward, step, seq in whens)

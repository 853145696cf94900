"""Judges each side by its distance from a truth: which of them rounds more, and which one is wrong.

One rounding to bfloat16 leaves about 1.7e-3 against float64, whatever kernel makes it, as long as sums are taken in a
longer dtype. So the squared distance counts roundings, and a module that rounds once more than the reference's shows,
although both are within tolerance of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from tensortap.compare.judge.attribution import Attribution
from tensortap.compare.judge.findings import FindingBuilder
from tensortap.compare.judge.implementations import Implementations
from tensortap.compare.judge.rules.rounding import EPSILON
from tensortap.compare.judge.structure import Structure
from tensortap.compare.matched import Matched
from tensortap.core.causes import Cause
from tensortap.core.records import WRONG_STATUSES, Finding, TruthErrors, display_name
from tensortap.kernels.pairs.truth import TruthMeasure

__all__ = [
    "NO_PRECISION",
    "Precision",
    "TruthPairs",
    "calls_with_other_values",
    "is_cast",
    "is_noise",
    "judge_isolated",
    "least_ratio",
    "less_exact",
    "one_rounding",
]

LEAST_RATIO = 1.2
"""A side that is this many times further off rounds more. Chunked sums move it by 0.01, eager attention by 0.15.

Gradients in bfloat16, ten families of transformers: products in parts with sums in float32, backward passes of norms,
activations, softmax and losses by hand in float32, fused norms and recomputation moved it by a tenth of a rounding at
most, or made it smaller. Another number of threads: 1.01, and 1.15 in one norm's weight, which is 1.4 standard errors.
One rounding more is 1.5: weight gradients of half a batch each, which autograd adds in bfloat16."""
_LEAST_OF_ROUNDING = 0.1
"""Least number of roundings between the sides: a few elements that differ, as parameters after a step, are none."""
LEAST_OF_LONG = 8.0
"""The same in float32 and float64, where the error is that of sums, and follows their order."""
_LEAST_OF_OTHER = 2.0
"""The same if the call returns other values than the reference's, as another implementation of attention does."""
_LEAST_OF_OTHER_GRADIENT = 3.0
"""The same for gradients, which eager attention takes as differences of products that it has rounded. In nine families
it was up to 2.2 times as far as a fused one in BERT, and 1.6 times in the others; the reverse, 1.2 times."""
_MOST_CANCELLED = 4.0
"""A gradient of another implementation is not judged if the nearer side is this many times one rounding off: it is what
is left where larger terms cancel, and follows the order in which they are rounded. Attention over states that are all
alike (Whisper's decoder) leaves 5.7 with eager attention, and 18 with a fused one."""
_LEAST_DILUTED = 1.08
"""The same if the sides differ by whole roundings: one more is a small part of many."""
_CERTAIN, _VERY_CERTAIN = 3.0, 5.0
"""Standard errors by which the squared distances differ."""
_LONG = ("float32", "float64")
LEAST_ROUNDINGS = 0.7
"""Least number of roundings more, where the ratio says little: of many roundings, one more is a small part."""
_MOST_NOISE = 0.1
"""If even the nearer side is this far off, the value is what is left when larger ones cancel: a bias before a norm, the
bias of a key. Rounding decides its size, and how often a side rounds cannot be told. Sums of 100 tokens that do not
cancel leave 0.01 in bfloat16 at most."""
_ONE_ROUNDING = 0.2125
"""Distance that rounding once to the nearest leaves, in epsilons."""


@dataclass(frozen=True)
class TruthPairs:
    """The measured distances from the truth, by pair, and what they are judged by."""

    measures: Mapping[int, TruthMeasure]
    of: str
    """The origin of the truth in words, such as "float64"."""
    of_reference: bool | None
    """Whether the truth is a result of the reference's own code, or of the candidate's; None if a third run has it."""
    dtypes: Callable[[int], tuple[str, str]]
    """The dtypes of a pair on both sides."""
    other_values: Callable[[int], bool] = lambda pair: False
    """Whether the call of a pair returns other values than the reference's call."""
    is_gradient: Callable[[int], bool] = lambda pair: False
    notes: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    """Modules that differ and have no truth."""
    errors: Mapping[int, TruthErrors] = field(default_factory=dict)
    """In free runs: the distances of both sides by pair, accumulated up to that pair."""


@dataclass(frozen=True)
class Precision:
    """Findings and measurements that the truth adds to a comparison."""

    findings: list[Finding] = field(default_factory=list)
    """Modules of the candidate that are less exact than the reference's, within tolerance; the earliest first."""
    errors: Mapping[int, TruthErrors] = field(default_factory=dict)
    """By pair: the distances of both sides."""
    notes: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    """Modules that differ within tolerance, and of which no truth says which side rounds more."""
    doubtful: list[Finding] = field(default_factory=list)
    """Modules that are less exact, but maybe only because they are another implementation."""
    hidden: tuple[str, ...] = ()
    """Modules of free runs that differ within tolerance, and in which one rounding more would not show."""


NO_PRECISION = Precision()


def calls_with_other_values(
    matched: Matched, structure: Structure, rename: Callable[[str], str]
) -> Callable[[int], bool]:
    """Return a function of a pair: whether the call whose code made it returns other values than the reference's.

    rename: from the candidate's names to the reference's.
    """
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    alone = [left.key(row) for row in alignment.only_reference.tolist()]
    theirs = (right.key(row) for row in alignment.only_candidate.tolist())
    alone += [key._replace(module=rename(key.module)) for key in theirs]
    others = {(key.step, key.micro, key.module, key.call) for key in alone if key.kind == "output"}

    def returns_others(pair: int) -> bool:
        call = structure.call_of(pair)
        call = call.parent if call is not None and structure.kind[pair] in ("input", "grad_output") else call
        return call is not None and (*call.scope[1:], call.module, call.number) in others

    return returns_others


def errors_of(measure: TruthMeasure, pairs: TruthPairs, pair: int, exact: bool = True) -> TruthErrors:
    """Return the relative distances of both sides, and how many roundings lie between them."""
    size = measure.truth or math.nan
    reference, candidate = ((side / size) ** 0.5 for side in (measure.reference, measure.candidate))
    unit = one_rounding(*pairs.dtypes(pair))
    roundings = (candidate**2 - reference**2) / unit**2 if unit else math.nan
    return TruthErrors(pairs.of, reference, candidate, roundings, pairs.of_reference, exact)


def one_rounding(reference: str, candidate: str) -> float | None:
    """Return the distance that one rounding leaves in the dtype of a pair; None if it cannot be counted."""
    if reference != candidate or reference in _LONG:
        return None
    epsilon = EPSILON.get(reference)
    return None if epsilon is None else _ONE_ROUNDING * epsilon


def least_ratio(pairs: TruthPairs, pair: int) -> float:
    """Return the ratio from which on a side counts as less exact."""
    if pairs.dtypes(pair)[0] in _LONG:
        return LEAST_OF_LONG
    if pairs.other_values(pair):
        return _LEAST_OF_OTHER_GRADIENT if pairs.is_gradient(pair) else _LEAST_OF_OTHER
    return LEAST_RATIO


def judge_isolated(
    builder: FindingBuilder,
    pairs: TruthPairs,
    attribute: Callable[[int], Attribution],
    known: Collection[tuple[int, str]],
) -> Precision:
    """Judge modules that ran on the reference's own inputs: each error is the module's own.

    attribute: the module whose code made a pair.
    known: ranks and modules that are wrong for another reason.
    """
    groups: dict[tuple[int, str, str, str, str], list[int]] = {}
    structure, status = builder.structure, builder.judgement.status
    attributed = {pair: attribute(pair) for pair in sorted(pairs.measures)}
    for pair, attribution in attributed.items():
        blamed = builder.module_to_blame(pair, attribution)
        rank, record = structure.scope[pair][0], (structure.module[pair], structure.kind[pair], structure.path[pair])
        groups.setdefault((rank, blamed, *record), []).append(pair)
    measures = {group: _sum([pairs.measures[row] for row in rows]) for group, rows in groups.items()}
    errors_by_group = {group: errors_of(measures[group], pairs, rows[0]) for group, rows in groups.items()}
    implementations = Implementations(builder)
    for group, found in errors_by_group.items():
        if implementations.is_attention(group[1]) and not is_cast(pairs, groups[group][0]):
            implementations.add(group[1], groups[group][0], found)
    findings: dict[tuple[int, str], Finding] = {}
    doubtful: dict[tuple[int, str], Finding] = {}
    errors: dict[int, TruthErrors] = {}
    better: dict[str, float] = {}
    other: dict[str, float] = {}
    for group, rows in groups.items():
        (rank, blamed, *_), measure, found = group, measures[group], errors_by_group[group]
        errors |= dict.fromkeys(rows, found)
        if (rank, blamed) in known or any(status[row] in WRONG_STATUSES for row in rows) or is_cast(pairs, rows[0]):
            continue
        if attributed[rows[0]].from_outside or is_noise(found) or abs(found.roundings) < _LEAST_OF_ROUNDING:
            continue
        if _is_cancelled(pairs, rows[0], found):
            continue
        least, sure = least_ratio(pairs, rows[0]), _certainty(measure)
        diluted = least == LEAST_RATIO and found.ratio >= _LEAST_DILUTED and found.roundings >= LEAST_ROUNDINGS
        limits = implementations.limits(blamed) if least == LEAST_RATIO else None
        if (found.ratio >= least and sure >= _CERTAIN) or (diluted and sure >= _VERY_CERTAIN):
            row = rows[0]
            if limits is not None and found.ratio < (limits.gradients if pairs.is_gradient(row) else limits.values):
                if limits.known:
                    other.setdefault(blamed, found.ratio)
                    continue
                into = doubtful
            else:
                into = findings
            finding = builder.build(row, attributed[row], row)
            earlier = into.get((rank, blamed))
            if earlier is None or (finding.row or 0) < (earlier.row or 0):
                into[rank, blamed] = less_exact(finding, found, least)
        elif found.ratio >= LEAST_RATIO and sure >= _CERTAIN and pairs.other_values(rows[0]):
            other.setdefault(blamed, found.ratio)
        elif found.ratio <= 1 / least and sure <= -_CERTAIN and not _is_recorded_as_one_sum(structure, rows[0]):
            better.setdefault(blamed, found.ratio)
    better = {module: ratio for module, ratio in better.items() if all(module != each for _, each in findings)}
    other = {module: ratio for module, ratio in other.items() if all(module != each for _, each in findings)}
    notes = *_better(better, pairs), *_other(other, pairs), *pairs.notes
    return Precision(_ordered(findings), errors, notes, pairs.unjudged, _ordered(doubtful))


def _ordered(findings: Mapping[tuple[int, str], Finding]) -> list[Finding]:
    return sorted(findings.values(), key=lambda each: (each.key.step, each.row or 0))


def less_exact(finding: Finding, truth: TruthErrors, least: float) -> Finding:
    """Return the finding of a module that is less exact, though within tolerance."""
    rule = f"{least:g} times as far from the {truth.of} result as the reference"
    return replace(finding, cause=Cause.LESS_EXACT, status="imprecise", truth=truth, rule=rule)


def is_noise(errors: TruthErrors) -> bool:
    """Whether a value is zero in theory, or nearly."""
    return min(errors.reference, errors.candidate) > _MOST_NOISE


def _is_cancelled(pairs: TruthPairs, pair: int, errors: TruthErrors) -> bool:
    """Whether a gradient of another implementation is so small a difference that the order of roundings decides."""
    unit = one_rounding(*pairs.dtypes(pair))
    if unit is None or not pairs.is_gradient(pair) or not pairs.other_values(pair):
        return False
    return min(errors.reference, errors.candidate) > _MOST_CANCELLED * unit


def _is_recorded_as_one_sum(structure: Structure, pair: int) -> bool:
    """Whether a pair is the gradient of a value that several modules inside a container use.

    In an isolated run the candidate adds up the recorded gradients of these modules. The reference's was recorded as
    one sum of all uses, so that it seems to round more often.
    """
    kind, call = structure.kind[pair], structure.call_of(pair)
    if call is None or kind not in ("grad_input", "grad_output"):
        return False
    users = [call]
    if kind == "grad_output":
        users = [user for tensor in structure.returned(pair, call) for user in structure.consumers.get(tensor, ())]
    return any(user.children for user in users)


def is_cast(pairs: TruthPairs, pair: int) -> bool:
    """Whether the sides have different dtypes: the shorter one is further off, and that is said elsewhere."""
    reference, candidate = pairs.dtypes(pair)
    return reference != candidate


def _certainty(measure: TruthMeasure) -> float:
    """Return by how many standard errors rows of the candidate are further off than those of the reference."""
    return measure.lean / measure.spread**0.5 if measure.spread > 0 else 0.0


def _sum(measures: list[TruthMeasure]) -> TruthMeasure:
    total = measures[0]
    for each in measures[1:]:
        total += each
    return total


def _better(ratios: Mapping[str, float], pairs: TruthPairs) -> list[str]:
    """Return a note on the modules in which the candidate is the more exact one."""
    if not ratios:
        return []
    first, *rest = ratios
    times = 1 / ratios[first] if ratios[first] else math.inf
    more = f", and so is it in {len(rest)} more modules" if rest else ""
    how_much = f"the reference is {times:.2g} times further from the {pairs.of} result"
    return [f"the candidate is the more exact one in {display_name(first)} ({how_much}){more}"]


def _other(ratios: Mapping[str, float], pairs: TruthPairs) -> list[str]:
    """Return a note on modules that are less exact by as much as another implementation may be."""
    if not ratios:
        return []
    first, *rest = ratios
    more = f"; so is it with {len(rest)} more modules" if rest else ""
    return [
        f"{display_name(first)} is {ratios[first]:.2g} times as far from the {pairs.of} result as the reference's, as "
        f"another implementation may be, such as eager attention instead of fused{more}"
    ]

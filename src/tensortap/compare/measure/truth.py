"""How far both sides of a comparison are from a third run that is known to be more exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from tensortap.compare.align.alignment import Alignment, align
from tensortap.compare.align.side import Ints, Scope, Side
from tensortap.compare.judge.precision import TruthPairs, one_rounding
from tensortap.compare.judge.rules.rounding import EPSILON
from tensortap.compare.matched import Matched
from tensortap.compare.measure.engine import Engine
from tensortap.compare.measure.measures import Measures, estimate, prepare
from tensortap.compare.measure.tensors import measure_tensors
from tensortap.compare.options import ComparisonOptions
from tensortap.compare.sources import open_source
from tensortap.core.records import GRADIENT_KINDS, TruthErrors
from tensortap.errors import UsageError

__all__ = ["truth_of"]

TruthDtypes = Callable[[int], tuple[str, str]]

_FORWARD = ("input", "output")
_WORDS = "truth run's"
_LEAST_SHARE = 0.1


def truth_of(
    matched: Matched,
    options: ComparisonOptions,
    other_values: Callable[[int], bool],
    opened: ExitStack,
    engine: Engine | None = None,
) -> TruthPairs | None:
    """Return the distances of both sides from the run `truth`, for inputs, outputs and gradients that it has, too.

    other_values: whether the call of a pair returns other values than the reference's.
    """
    if options.truth is None:
        return None
    run = open_source(options.truth, opened)
    left, alignment = matched.reference, matched.alignment
    truth = Side(run, Scope(options.modules, options.kinds))
    placed = align(left, truth)
    rows = np.full(len(left), -1, np.int64)
    rows[placed.reference] = placed.candidate
    known = rows[alignment.reference] >= 0
    kinds = _FORWARD, _gradient_kinds(truth, left)
    forward, gradients = (left.kind.among(each)[alignment.reference] for each in kinds)
    chosen = np.flatnonzero((forward | gradients) & known)
    if (found := int((forward & known).sum())) < _LEAST_SHARE * max(1, int(forward.sum())):
        raise UsageError(
            f"truth: {run.path} has {found:,} of the {int(forward.sum()):,} inputs and outputs to compare; "
            "capture the reference's model in float32 or float64 on the same batch, with the same names"
        )
    _check_longer(truth, left, rows[alignment.reference[chosen]], alignment.reference[chosen])
    sides = ((left, alignment.reference[chosen]), (matched.candidate, alignment.candidate[chosen]))
    ours, theirs = (_measure(truth, rows[alignment.reference[chosen]], *side, options, engine) for side in sides)
    dtypes = _dtypes(matched)
    errors = _errors(chosen, ours, theirs, dtypes)
    return TruthPairs({}, _WORDS, None, dtypes, other_values, gradients.tolist().__getitem__, errors=errors)


def _gradient_kinds(truth: Side, reference: Side) -> tuple[str, ...]:
    """Return the kinds of gradients to compare; another framework may hold weights in another layout."""
    frameworks = {side.run.info.get("framework") for side in (truth, reference)}
    return GRADIENT_KINDS if len(frameworks) == 1 else tuple(kind for kind in GRADIENT_KINDS if kind != "param_grad")


def _measure(
    truth: Side, rows: Ints, side: Side, its_rows: Ints, options: ComparisonOptions, engine: Engine | None
) -> Measures:
    nobody = np.empty(0, np.int64)
    alignment = Alignment(rows, its_rows, nobody, nobody)
    measures = prepare(truth, side, alignment)
    whole = truth.kept[rows[measures.open]] & side.kept[its_rows[measures.open]]
    exact, estimated = measures.open[whole], measures.open[~whole]
    estimate(measures, truth, side, alignment, estimated)
    for pair, measure in measure_tensors(truth, side, alignment, exact, (None, None), engine):
        measures.take(pair, measure)
    return measures


def _errors(chosen: Ints, reference: Measures, candidate: Measures, dtypes: TruthDtypes) -> dict[int, TruthErrors]:
    """Return the relative distances of both sides by pair, where both are known."""
    found = {}
    for at, pair in enumerate(chosen.tolist()):
        ours, theirs = float(reference.rel_l2[at]), float(candidate.rel_l2[at])
        if not np.isfinite([ours, theirs]).all() or at in reference.limits or at in candidate.limits:
            continue
        unit = one_rounding(*dtypes(pair))
        roundings = (theirs**2 - ours**2) / unit**2 if unit else float("nan")
        exact = bool(reference.exact[at] and candidate.exact[at])
        bars = [each.rel_l2_bar[at] / each.rel_l2[at] for each in (reference, candidate) if each.rel_l2[at]]
        found[pair] = TruthErrors(_WORDS, ours, theirs, roundings, None, exact, float(max(bars, default=0.0)))
    return found


def _dtypes(matched: Matched) -> TruthDtypes:
    left, right, alignment = matched.reference, matched.candidate, matched.alignment

    def dtypes(pair: int) -> tuple[str, str]:
        return left.dtype[int(alignment.reference[pair])], right.dtype[int(alignment.candidate[pair])]

    return dtypes


def _check_longer(truth: Side, reference: Side, rows: Ints, its_rows: Ints) -> None:
    """Raise UsageError if the truth is nowhere in a longer dtype: then it is just another run."""
    longest = [
        min((EPSILON[name] for name in set(side.dtype.at(at)) if name in EPSILON), default=1.0)
        for side, at in ((truth, rows), (reference, its_rows))
    ]
    coarsest = max((EPSILON[name] for name in set(reference.dtype.at(its_rows)) if name in EPSILON), default=0.0)
    if longest[0] >= coarsest:
        raise UsageError(
            f"truth: {truth.run.path} is in no longer dtype than the reference; capture the model in float32 or float64"
        )

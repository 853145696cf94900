"""The sentence about a whole comparison: the first divergence, or how far all that was compared agrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from tensortap.compare.align.distinct import distinct
from tensortap.compare.align.side import Side
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.matched import Matched
from tensortap.compare.say import beside
from tensortap.compare.say.agreement import describe_large, describe_match, describe_rounding_alone, describe_worst
from tensortap.compare.say.arguments import describe_call
from tensortap.compare.say.divergence import ComparedTensor, describe_divergence, describe_isolated, forward_agrees
from tensortap.compare.say.gaps import (
    about_selection,
    describe_hidden_optimizer,
    describe_moved_parameters,
    describe_other_steps,
    describe_unseen_parameters,
    describe_unseen_start,
)
from tensortap.compare.say.gradients import describe_factor, describe_inner_use, describe_step_gradient
from tensortap.compare.say.loop import describe_loop, moved_parameters, parameters_unseen
from tensortap.compare.say.operators import describe_operator
from tensortap.compare.say.parameters import describe_changed_parameters
from tensortap.compare.say.precision import describe_truth
from tensortap.compare.translate.mapped import frameworks_differ
from tensortap.core.causes import Cause
from tensortap.core.records import Finding

__all__ = ["sentence_of", "several_ranks"]

_LARGE = 0.1
"""Relative error from which on a close pair needs words: such a tensor consists mostly of rounding."""


def sentence_of(
    births: Sequence[Finding],
    matched: Matched,
    judgement: Judgement,
    counts: Mapping[str, int],
    left_out: str,
    isolated: bool,
) -> str:
    left, right = matched.reference, matched.candidate
    if not births:
        return _agreement(matched, judgement, counts, left_out, isolated)
    first, several = births[0], several_ranks(matched)
    tensors = None if first.row is None else _compared_tensors(matched, first.row)
    if isolated:
        said = describe_isolated(births, tensors, several) + describe_call(first)
        return said + beside.describe_given(first, matched) + _beside(first, matched, isolated)
    forward = _forward(matched, judgement, first)
    candidate = str(right.run.info["framework"]) if frameworks_differ(left.run, right.run) else "the candidate"
    steps = _other_steps(matched, first.key.step)
    divergence = describe_divergence(births, tensors, several, forward, candidate, ran_alike=not steps)
    if first.row is None or first.cause is Cause.CHECKPOINT:
        ties = beside.describe_ties(first, matched.settings)  # these tell which parameters an optimizer holds
        return divergence + describe_operator(first) + (ties or describe_loop(first, matched))
    if moved_parameters(first, matched.settings.loop):
        unseen = describe_moved_parameters()
    elif parameters_unseen(left, first):
        unseen = describe_unseen_parameters()
    elif not first.arguments and not beside.is_explained(first, matched) and (kind := _start_unseen(left, first)):
        unseen = describe_unseen_start(kind)
    else:
        unseen = describe_hidden_optimizer(_hidden(matched, judgement, first.key.step))
    if left.is_selection:
        divergence, unseen = about_selection(divergence), about_selection(unseen)
    called = describe_call(first) + beside.describe_given(first, matched)
    return divergence + called + _beside(first, matched) + (steps or unseen)


def _beside(first: Finding, matched: Matched, isolated: bool = False) -> str:
    """Return what the attributes, the training loop, the dtype and a truth add about the first finding."""
    settings = beside.describe_attributes(first, matched.settings)
    settings += describe_loop(first, matched, beside.is_explained(first, matched))
    settings = (
        describe_factor(first, matched)
        + describe_inner_use(first, matched)
        + settings
        + describe_step_gradient(first, matched, isolated)
    )
    settings += describe_changed_parameters(first, matched) + beside.describe_order(first, matched)
    settings += beside.describe_ties(first, matched.settings)
    settings = beside.describe_one_sided_modules(first, matched) + beside.describe_class(first, matched) + settings
    return describe_operator(first) + settings + beside.describe_dtype(first, matched) + describe_truth(first.truth)


def several_ranks(matched: Matched) -> bool:
    """Whether several ranks took part."""
    return max(len(matched.reference.ranks), len(matched.candidate.ranks)) > 1


def _agreement(matched: Matched, judgement: Judgement, counts: Mapping[str, int], left_out: str, isolated: bool) -> str:
    """Say that all compared pairs match, and what was `left_out`."""
    steps = "" if isolated else _other_steps(matched)
    unjudged = bool(counts.get("unjudged"))
    seen, every = _modules_seen(matched)
    agree = "Everything that both runs have matches" if steps or seen < every / 2 else "The runs match"
    if judgement.unsupported:
        agree = "As far as the records show, everything agrees"
    agree = "Everything that could be judged matches" if unjudged else agree
    if left_out:
        what = "could be judged" if unjudged else "was compared"
        agree = f"Too little in common to judge: {left_out}. Everything that {what} matches"
    elif isolated:
        agree = "Every module agrees on the reference's own inputs" + " as far as it could be judged" * unjudged
        if seen < every / 2:
            agree = f"Of {every} modules, {seen} ran on the reference's own inputs; all that was compared agrees"
    if not counts.get("close"):
        return describe_match(counts, None, agree) + steps + beside.describe_uncompared(matched, True)
    uncompared = beside.describe_uncompared(matched, optimizer=not judgement.unsupported)
    return describe_match(counts, _worst(matched, judgement), agree) + steps + uncompared


def _modules_seen(matched: Matched) -> tuple[int, int]:
    """Return of how many modules outputs were compared, and of how many the reference has some. A compiled model hides
    most of them."""
    side = matched.reference
    outputs = side.kind.among(("output",))
    compared = matched.alignment.reference[outputs[matched.alignment.reference]]
    return len(np.unique(side.module.codes[compared])), len(np.unique(side.module.codes[outputs]))


def _worst(matched: Matched, judgement: Judgement) -> str:
    """Say how far off the worst close pair is. Pairs that are large only because little is left of them come apart."""
    measures, left, rows = matched.measures, matched.reference, matched.alignment.reference
    close = judgement.having("close")
    off = np.where(close & ~np.isnan(measures.rel_l2), measures.rel_l2, -1.0)
    alone = np.isin(np.arange(len(off)), list(judgement.cancelling)) & (off >= 0)
    large = (off > _LARGE) & ~alone
    parts = []
    if (off[~large & ~alone] >= 0).any():
        worst = int(np.argmax(np.where(large | alone, -1.0, off)))
        parts.append(describe_worst(float(off[worst]), str(left.key(int(rows[worst])))))
    if large.any():
        worst = int(np.argmax(np.where(large, off, -1.0)))
        words = float(off[worst]), str(left.key(int(rows[worst]))), _why_large(worst, matched, judgement)
        parts.append(describe_large(int(large.sum()), *words, alone=not parts))
    if alone.any():
        key = str(left.key(int(rows[np.argmax(alone)])))
        parts.append(describe_rounding_alone(int(alone.sum()), key, alone=not parts))
    return "; ".join(parts)


def _why_large(pair: int, matched: Matched, judgement: Judgement) -> str:
    """Return the rule that allows a large difference; of a parameter, whether its gradient explains it."""
    left, rows = matched.reference, matched.alignment.reference
    row = int(rows[pair])
    if left.kind[row] != "param":
        return judgement.rule[pair]
    moved = {(left.module[int(rows[each])], left.path[int(rows[each])]) for each in judgement.cancelling}
    alone = (left.module[row], left.path[row]) in moved
    return "the gradients that move it consist of rounding alone" if alone else judgement.rule[pair]


def _hidden(matched: Matched, judgement: Judgement, until: int) -> float | None:
    """Return the largest tolerance up to a step that is due to unrecorded parameters; None if no pair needed it."""
    rows = sorted(judgement.unsupported)
    steps = matched.reference.step[matched.alignment.reference[rows]].tolist()
    allowed = [float(judgement.tolerance[row]) for row, step in zip(rows, steps, strict=True) if step <= until]
    return max(allowed, default=None)


def _other_steps(matched: Matched, until: int | None = None) -> str:
    """Say that one side lacks steps, or ran one more often, up to a step. Shifted steps are not mentioned."""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    if not len(alignment.only_reference) and not len(alignment.only_candidate):
        return ""
    if left.run.is_checkpoint or right.run.is_checkpoint:
        return ""
    if np.any(left.step[alignment.reference] != right.step[alignment.candidate]):
        return ""
    backward = all("backward" in side.phase.words for side in (left, right))
    return describe_other_steps(*(_times(side, backward, until) for side in (left, right)))


def _times(side: Side, backward: bool, until: int | None) -> dict[int, int]:
    """Count how often each step ran, up to a step. With `backward`, count only passes that have one."""
    ran = side.phase.among(("backward",)) if backward else ~side.phase.among(("eval",))
    if until is not None:
        ran &= side.step <= until
    return dict(Counter(step for step, _ in distinct(side.step[ran], side.micro[ran])))


def _start_unseen(side: Side, first: Finding) -> str:
    """Return what the first module that is wrong in the first step may have got from the start: other parameters, or
    other buffers if it has nothing else. Empty if that is known."""
    if first.cause is not Cause.OUTPUT or first.key.step != int(side.step.min()):
        return ""
    if first.module not in side.module.words:
        return ""
    own = np.flatnonzero(side.module.codes == side.module.words.index(first.module))
    kinds = set(side.kind.at(own))
    if "param" not in kinds and (first.module in side.frozen or "param_grad" in kinds):
        return "param"
    buffers = (side.run.loop(first.rank).value("buffers", first.key.step) or {}).get("names") or ()
    has_buffers = any(str(name).rpartition(".")[0] == first.module for name in buffers)
    return "buffer" if has_buffers and not kinds & {"param", "param_grad", "buffer"} else ""


def _compared_tensors(matched: Matched, pair: int) -> tuple[ComparedTensor, ComparedTensor]:
    """Return what a sentence needs to know about the reference's tensor and the candidate's."""
    rows = matched.alignment.reference[pair], matched.alignment.candidate[pair]
    ours, theirs = (
        ComparedTensor(side.shape(int(row)), int(counts["nan"][pair] + counts["inf"][pair]), float(counts["l2"][pair]))
        for side, row, counts in zip(
            (matched.reference, matched.candidate),
            rows,
            (matched.measures.sides[name] for name in ("reference", "candidate")),
            strict=True,
        )
    )
    return ours, theirs


def _forward(matched: Matched, judgement: Judgement, first: Finding) -> str:
    """Say that the forward pass of a finding's step agrees; empty if it was not recorded."""
    side, rows = matched.reference, matched.alignment.reference
    passed = rows[(side.phase.among(("forward",)) & (side.step == first.key.step) & (side.rank == first.rank))[rows]]
    if not len(passed):
        return ""
    unjudged = judgement.having("unjudged")[np.isin(rows, passed)]
    return forward_agrees(bool(unjudged.any()))

"""What a comparison says in the end: verdict, sentence, notes, and what only one side has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from tensortap.compare import sentence
from tensortap.compare.align import Renames, suggest
from tensortap.compare.judge import Judgement
from tensortap.compare.mapped import frameworks_differ, words_of
from tensortap.compare.matching import Matched
from tensortap.compare.pairs_table import table_of
from tensortap.compare.side import Side
from tensortap.compare.tolerance import Policy
from tensortap.records import Comparison, Finding, Unmatched, Verdict

__all__ = ["conclude"]

_MOST_UNMATCHED = 10_000
_LEAST_SHARE = 0.1


def conclude(
    matched: Matched,
    judgement: Judgement,
    born: Mapping[int, Finding],
    policy: Policy,
    renames: Renames,
    missing: Sequence[Finding] | None = None,
) -> Comparison:
    """The comparison, from what was judged and the births by their pair, the earliest first.

    Of an isolated run, `missing` is what the candidate lacks and should not; of others, None.
    """
    left, right, alignment, measures = matched.reference, matched.candidate, matched.alignment, matched.measures
    rows = alignment.reference
    births = [*born.values(), *(missing or ())]
    counts = Counter(judgement.status)
    one_sided = len(alignment.only_reference) + len(alignment.only_candidate)
    if one_sided:
        counts["unmatched"] = one_sided
    pairs = len(rows)
    verdict: Verdict = "diverged" if births else "match"
    if pairs < _LEAST_SHARE * max(1, min(len(left), len(right))) or not pairs:
        verdict = "incomparable"
    first = births[0] if births and verdict == "diverged" else None
    notes = _notes(matched, renames, verdict, births)
    return Comparison(
        reference=str(left.run.path),
        candidate=str(right.run.path),
        verdict=verdict,
        sentence=_sentence(verdict, born, matched, judgement, counts, missing),
        first=first,
        births=births,
        counts=dict(counts),
        unmatched=_unmatched(matched),
        table=table_of(left, right, alignment, measures, judgement, born),
        policy=policy.described(),
        notes=notes,
        info={"reference": left.run.info, "candidate": right.run.info},
        mapping=None if matched.plan is None else matched.plan.report(),
        isolated=missing is not None,
    )


def _sentence(
    verdict: str,
    born: Mapping[int, Finding],
    matched: Matched,
    judgement: Judgement,
    counts: Mapping[str, int],
    missing: Sequence[Finding] | None,
) -> str:
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    if verdict == "incomparable":
        return sentence.too_little(len(left), len(right), len(alignment.reference))
    agree = "The runs match" if missing is None else "Every module agrees on the reference's own inputs"
    if missing and not born:
        return sentence.isolated(missing, None, len(left.ranks) > 1)
    if not born:
        if not counts.get("close"):
            return sentence.matched(counts, None, agree)
        worst = int(np.argmax(np.where(np.array(judgement.status) == "close", matched.measures.rel_l2, -1.0)))
        key = left.key(int(alignment.reference[worst]))
        return sentence.matched(counts, (float(matched.measures.rel_l2[worst]), str(key)), agree)
    pair, first = next(iter(born.items()))
    shapes = left.shape(int(alignment.reference[pair])), right.shape(int(alignment.candidate[pair]))
    counts_of = [matched.measures.sides[side] for side in ("reference", "candidate")]
    ours, theirs = (
        sentence.Tensor(shape, int(side["nan"][pair] + side["inf"][pair]))
        for shape, side in zip(shapes, counts_of, strict=True)
    )
    if left.run.is_checkpoint and right.run.is_checkpoint:
        return sentence.checkpoints(first, len(born), (ours, theirs))
    if missing is not None:
        return sentence.isolated([*born.values(), *missing], (ours, theirs), len(left.ranks) > 1)
    at_start = first.key.step == int(left.step.min())
    changed = sum(f.key[:1] == first.key[:1] and f.key.kind == "param" and f.key.call == 0 for f in born.values())
    return sentence.parted(
        first,
        changed if at_start else 0,
        (ours, theirs),
        len(left.ranks) > 1,
        _has_forward(left),
        str(right.run.info["framework"]) if frameworks_differ(left.run, right.run) else "the candidate",
    )


def _has_forward(side: Side) -> bool:
    return not {"input", "output"}.isdisjoint(side.kind.words)


def _notes(matched: Matched, renames: Renames, verdict: str, births: list[Finding]) -> list[str]:
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    notes = [
        f"{name}: {text}" for name, side in (("reference", left), ("candidate", right)) for text in side.run.notices
    ]
    one_sided = len(alignment.only_reference) + len(alignment.only_candidate)
    if matched.plan is not None:
        if births and births[0].cls.startswith("Dropout") and frameworks_differ(left.run, right.run):
            notes.append("dropout draws other numbers in each framework: set its rate to 0 on both sides")
        notes += words_of(matched.plan)
        if len(matched.measures.bounded):
            notes.append(
                'of tensors in another layout a summary tells norms and counts alone; capture with keep="tensors"'
            )
    elif one_sided > len(alignment.reference) // 4 and not renames and (rules := suggest(left, right)):
        options = " ".join(f"--rename '{rule}'" for rule in rules)
        notes.append(f"many names are on one side only; try {options}")
    if births and np.any(~matched.measures.exact & ~np.isnan(matched.measures.rel_l2)):
        notes.append('estimated from sketches; capture with keep="tensors" to measure every element')
    return notes


def _unmatched(matched: Matched) -> list[Unmatched]:
    found = []
    alignment = matched.alignment
    for name, side, rows in (
        ("reference", matched.reference, alignment.only_reference),
        ("candidate", matched.candidate, alignment.only_candidate),
    ):
        for row in rows[:_MOST_UNMATCHED].tolist():
            key = side.key(row)
            own = int(name == "candidate")
            why = matched.plan.why(own, key.module, key.kind, key.path) if matched.plan is not None else ""
            found.append(Unmatched(name, key, int(side.rank[row]), side.cls[row], why))  # type: ignore[arg-type]
    return found

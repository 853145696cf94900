"""Evidence from joining the ranks of two runs: findings, causes, notes, and records that could not be judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from tensortap.compare.align.side import Side
from tensortap.compare.join.findings import Disagreement, disagreements, layout_finding, unreduced_sums
from tensortap.compare.join.hypotheses import explain
from tensortap.compare.join.joining import NOT_JOINED, Joining, Unjoined
from tensortap.compare.join.norms import ACCUMULATED, UNJOINED_LIMITS
from tensortap.compare.join.source import JoinedSource
from tensortap.compare.judge.structure import Structure
from tensortap.compare.matched import Matched
from tensortap.compare.say.formatting import listed
from tensortap.core.records import Finding, Key, Unmatched, display_name

__all__ = ["NO_PARALLEL_EVIDENCE", "ParallelEvidence"]

_FEW = 3
_UNSEEN = "the {} recorded the gradient that the optimizer got, not the one from backward"
_OTHER = {"reference": "candidate", "candidate": "reference"}
_HOW = (
    "say how they belong together with layout= of tensortap.capture (docs/parallel.md), or select ranks with --rank to "
    "compare them one by one"
)


@dataclass(frozen=True)
class ParallelEvidence:
    """Findings and words about the ranks of both sides."""

    joining: Joining = NOT_JOINED
    matched: Matched | None = None
    unjoined: tuple[Unjoined, ...] = ()
    findings: dict[tuple[int, float], Finding] = field(default_factory=dict)
    """Replicas that disagree and layouts that contradict themselves, by step and position in the reference's order."""
    rounding: tuple[Disagreement, ...] = ()
    """Replicas of activations and gradients that differ by rounding."""

    @classmethod
    def of(cls, joining: Joining, matched: Matched) -> ParallelEvidence:
        """Collect what joining found."""
        if not joining:
            return cls(matched=matched)
        unjoined = tuple(_selected(joining, matched))
        findings: dict[tuple[int, float], Finding] = {}
        rounding: list[Disagreement] = []
        places = {"reference": _positions(matched, "reference"), "candidate": _positions(matched, "candidate")}
        paired = {
            "reference": set(matched.reference.row[matched.alignment.reference].tolist()),
            "candidate": set(matched.candidate.row[matched.alignment.candidate].tolist()),
        }
        for name, joined in joining.sides.items():
            side = matched.reference if name == "reference" else matched.candidate
            of = name if name == "reference" else ""
            for each in disagreements(joined, of):
                row = joined.row_of.get(each.group)
                if row is None or row not in places[name]:
                    continue
                if each.undecided and row in paired[name]:
                    continue  # none of them is right: that is the finding of the pair
                if each.is_rounding:
                    rounding.append(each)
                    continue
                key = (each.finding.key.step, places[name][row] - 0.5 + 1e-6 * len(findings))
                findings[key] = replace(each.finding, cls=_class(side, each.finding.key))
        for finding, row in unreduced_sums(joining.sides["candidate"]):
            key = (finding.key.step, places["candidate"].get(row, 0.0) - 0.5 + 1e-6 * len(findings))
            findings[key] = replace(finding, cls=_class(matched.candidate, finding.key))
        for each_unjoined in _contradictions(unjoined):
            findings[each_unjoined.key.step, -1.0 + 1e-6 * len(findings)] = layout_finding(each_unjoined)
        return cls(joining, matched, unjoined, findings, tuple(rounding))

    def explained(self, births: Sequence[Finding], structure: Structure) -> list[Finding]:
        """Return the births, with the causes that a parallel layout has."""
        if not self.joining or self.matched is None:
            return list(births)
        if self.matched.scaling.is_wrong:
            births = [self.matched.scaling.found_in(birth) for birth in births]
        return explain(births, self.matched, structure)

    def unjudged(self) -> str:
        """Say what was not compared because its layout is unknown or its ranks were not recorded; empty if nothing."""
        parts = []
        for side, joined in self.joining.sides.items():
            lacking = (joined.run.info.get("world") or 1) - len(joined.run.ranks)
            if lacking > 0:
                parts.append(f"{lacking:,} of the {side}'s {lacking + len(joined.run.ranks):,} ranks left no record")
        for side in ("reference", "candidate"):
            own = [each for each in self.unjoined if each.side == side]
            if own:
                first = own[0]
                count = f"{len(own):,} record{'s' * (len(own) > 1)}"
                parts.append(
                    f"{count} of the {side} cannot be joined over its ranks "
                    f"(as {display_name(first.key.module)} {first.key.kind} {first.key.path}: {first.why})"
                )
        if self.matched is not None and (open_pairs := _unjudged_pairs(self.matched)):
            parts.append(open_pairs)
        if self.rounding and self._parameters_unseen():
            odd = self.rounding[0].finding
            parts.append(
                f"replicas of {len(self.rounding):,} values differ by rounding (as {display_name(odd.key.module)} "
                f"{odd.key.kind} {odd.key.path} on rank {odd.rank}), and whether their parameters differ was not "
                'recorded: capture kinds=(..., "param")'
            )
        if self.matched is not None and self.matched.scaling.is_open:
            parts.append("the gradients differ by a factor that a later reduction may make up for")
        return ", and ".join(parts)

    def _parameters_unseen(self) -> bool:
        return self.matched is not None and "param" not in self.matched.candidate.kind.words

    def notes(self, births: Sequence[Finding]) -> list[str]:
        """Return the lines that accompany the verdict."""
        if not self.joining or self.matched is None:
            return []
        found = [words for side, joined in self.joining.sides.items() if (words := _joined_words(side, joined))]
        if self.unjoined:
            why = Counter(each.why for each in self.unjoined if each.plan.unknown)
            if why:
                found.append(f"not compared: {why.most_common(1)[0][0]}; {_HOW}")
        if self.rounding and not births and not self._parameters_unseen():
            fact = self.rounding[0].finding
            found.append(
                f"replicas of {len(self.rounding):,} values differ by rounding, as {fact.key}; their parameters agree"
            )
        for side, unseen in self.joining.unseen.items():
            if unseen:
                found.append(
                    f"the {side} did not record {len(unseen):,} gradients from backward, as {unseen[0]}; those that "
                    "its optimizer got were compared"
                )
        if sums := self.joining.accumulated:
            found.append(
                f"{len(sums):,} gradients of later micro batches were not compared, as {sums[0]}: one side shows only "
                "what was accumulated; the gradients that the optimizers got were compared"
            )
        if note := self.matched.scaling.note():
            found.append(note)
        return found

    def reasons(self, unmatched: Sequence[Unmatched]) -> Sequence[Unmatched]:
        """Return one-sided records, and those that could not be joined, with the reason."""
        if not self.unjoined and not any(self.joining.unseen.values()) and not self.joining.accumulated:
            return unmatched
        sides: Mapping[str, Literal["reference", "candidate"]] = {"reference": "reference", "candidate": "candidate"}
        return [
            *unmatched,
            *(Unmatched(sides[each.side], each.key, each.ranks[0], each.cls, each.why) for each in self.unjoined),
            *(
                Unmatched(sides[_OTHER[side]], key, 0, "", _UNSEEN.format(side))
                for side, unseen in self.joining.unseen.items()
                for key in unseen
            ),
            *(Unmatched("reference", key, 0, "", ACCUMULATED) for key in self.joining.accumulated),
        ]


NO_PARALLEL_EVIDENCE = ParallelEvidence()


def _unjudged_pairs(matched: Matched) -> str:
    """Say how many pairs are not of the same elements, as far as is known; empty if all are."""
    why = Counter(each for each in matched.measures.limits.values() if each in UNJOINED_LIMITS)
    count = sum(why.values())
    if not count:
        return ""
    which = f"{count:,} pair{'s' * (count > 1)} could not be judged"
    return f"{which} ({why.most_common(1)[0][0].removeprefix('only norms and counts: ')})"


def _selected(joining: Joining, matched: Matched) -> list[Unjoined]:
    """Return the records that could not be joined, among the modules, kinds and steps that take part."""
    found = []
    for each in joining.unjoined():
        side = matched.reference if each.side == "reference" else matched.candidate
        if side.takes(each.key):
            found.append(each)
    return found


def _contradictions(unjoined: Sequence[Unjoined]) -> list[Unjoined]:
    """Return the first record of each tensor whose parts do not cover it, although all ranks were recorded."""
    first: dict[tuple[str, str, str, str], Unjoined] = {}
    for each in unjoined:
        if each.recorded and not each.plan.unknown and not each.plan.lacking:
            first.setdefault((each.side, each.key.module, each.key.kind, each.key.path), each)
    return list(first.values())


def _positions(matched: Matched, name: str) -> dict[int, float]:
    """Return the position in the reference's order of each row of a side's index that takes part."""
    left, side = matched.reference, getattr(matched, name)
    rows = np.arange(len(side))
    if name == "reference":
        return dict(zip(side.row[rows].tolist(), left.seq[rows].astype(float).tolist(), strict=True))
    found = dict.fromkeys(side.row.tolist(), 0.0)
    pairs = zip(matched.alignment.candidate.tolist(), matched.alignment.reference.tolist(), strict=True)
    found |= {int(side.row[theirs]): float(left.seq[ours]) for theirs, ours in pairs}
    return found


def _class(side: Side, key: Key) -> str:
    rows = np.flatnonzero(side.module.among((key.module,)))
    return side.cls[int(rows[0])] if len(rows) else ""


def _joined_words(side: str, joined: JoinedSource) -> str:
    """Say which ranks were joined, and by which placements."""
    ranks = joined.run.ranks
    if len(ranks) < 2:
        return ""
    mesh = next(iter(joined.layout.pieces.meshes.values()), None)
    shape = " × ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.sizes, strict=True)) if mesh else ""
    guessed = sum(plan.guessed for plan in joined.layout.plans)
    words = f"the {side}'s {len(ranks):,} ranks{f' ({shape})' if shape else ''} were joined"
    if guessed:
        groups = joined.layout.where(np.array([plan.guessed for plan in joined.layout.plans], bool))
        some = list(dict.fromkeys(display_name(joined.layout.spot(group)[1]) for group in groups.tolist()))
        words += f"; the layout of {len(groups):,} records is a guess, as in {listed(some, _FEW)}"
    return words

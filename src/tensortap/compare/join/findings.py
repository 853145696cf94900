"""Replicas that disagree, and parts that do not make up a whole, as findings of one run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tensortap.compare.join.geometry import Extent
from tensortap.compare.join.joining import Unjoined
from tensortap.compare.join.layout import Layout, Vote
from tensortap.compare.join.merging import member_sketches
from tensortap.compare.join.resolve import key_of, rounding_of
from tensortap.compare.join.source import JoinedSource
from tensortap.compare.say.formatting import listed, rounded
from tensortap.core.causes import Cause
from tensortap.core.records import Difference, Finding, Key, LayoutFact

__all__ = ["Disagreement", "disagreements", "layout_finding", "unreduced_sums"]

_STATE = ("param", "buffer")
_MOST = 1000


@dataclass(frozen=True)
class Disagreement:
    """Ranks that hold another value than the replicas of it, from one step on."""

    finding: Finding
    group: int
    is_rounding: bool
    """Whether the values differ by no more than rounding, and no parameter or buffer is among them."""
    undecided: bool
    """Whether no value has a majority, and none of them is the other side's."""


def disagreements(joined: JoinedSource, side: str = "") -> list[Disagreement]:
    """Return the first disagreement of each tensor's replicas, in the order of steps.

    side: "reference" or "candidate", for the words; empty in a run by itself.
    """
    layout = joined.layout
    votes = sorted(layout.votes, key=lambda vote: (int(layout.pieces.step[vote.majority[0]]), vote.group))
    first: dict[tuple[object, ...], Vote] = {}
    for vote in votes:
        first.setdefault((*layout.spot(vote.group)[1:], _ranks(layout, vote.odd)), vote)
    chosen = list(first.values())[:_MOST]
    if not chosen:
        return []
    rows = np.array([row for vote in chosen for row in (vote.majority[0], vote.odd[0])], np.int64)
    sketches = member_sketches(joined.run, layout.pieces, rows)
    found = []
    for at, vote in enumerate(chosen):
        apart = _distance(sketches[2 * at], sketches[2 * at + 1])
        finding = _finding(joined, vote, apart, side)
        dtype = layout.pieces.forms[int(layout.pieces.form[vote.odd[0]])][0]
        rounding = finding.key.kind not in _STATE and apart <= rounding_of(dtype)
        found.append(Disagreement(finding, vote.group, rounding, vote.tied and not rounding))
    return found


def _finding(joined: JoinedSource, vote: Vote, apart: float, side: str) -> Finding:
    layout, key = joined.layout, Key(*key_of(joined.layout, vote.group))
    odd, others = _ranks(layout, vote.odd), _ranks(layout, vote.majority)
    count = len(odd) + len(others)
    of = f" of the {side}" if side else ""
    rank_words = f"rank{'s' * (len(others) > 1)} {listed(others)}"
    differ = f"off by about {rounded(apart)} (relative L2) from" if apart > 0 else "not equal to"
    undecided = ", and neither has a majority" if vote.tied else ""
    words = f"{'they are' if len(odd) > 1 else 'it is'} {differ} that of {rank_words}{of}{undecided}"
    stale = _stale_since(layout, vote)
    if stale is not None:
        words = f"it still holds the value from {stale}, unlike {rank_words}{of}"
    row = vote.odd[0]
    form = layout.pieces.forms[int(layout.pieces.form[row])]
    return Finding(
        key=key,
        rank=odd[0],
        cls="",
        status="replica",
        cause=Cause.REPLICA if stale is None else Cause.STALE_REPLICA,
        difference=Difference(
            elements=int(np.prod(form[1])),
            equal=False,
            exact=False,
            rel_l2=apart,
            rel_l2_bar=0.1 * apart,
            cosine=float("nan"),
            l2=float("nan"),
        ),
        tolerance=0.0,
        rule="replicas are equal bit for bit",
        inputs_matched=None,
        layout=LayoutFact(_axis(layout, odd, others), odd, count, words, apart),
    )


def _stale_since(layout: Layout, vote: Vote) -> str | None:
    """Return when the value was right that the odd rank still holds; None if it holds another one."""
    pieces, spot = layout.pieces, layout.spot(vote.group)
    if spot[2] not in _STATE or len(vote.odd) > 1:
        return None
    odd, rank = vote.odd[0], int(pieces.place[vote.odd[0]])
    step, call = int(pieces.step[odd]), int(pieces.call[odd])
    same = np.flatnonzero((pieces.spot == pieces.spot[odd]) & (pieces.digest == pieces.digest[odd]))
    before = [row for row in same.tolist() if (int(pieces.step[row]), int(pieces.call[row])) < (step, call)]
    others = [row for row in before if int(pieces.place[row]) != rank]
    if not others or not any(int(pieces.place[row]) == rank for row in before):
        return None
    last, after = max((int(pieces.step[row]), int(pieces.call[row])) for row in others)
    return f"{'after' if after else 'before'} step {last}"


def _axis(layout: Layout, odd: tuple[int, ...], others: tuple[int, ...]) -> str:
    """Return the axis along which the odd rank has a replica that is right."""
    axes = (layout.pieces.axis_between((odd[0], other)) for other in others)
    return next((axis for axis in axes if axis), "")


def _ranks(layout: Layout, rows: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(layout.pieces.rank[list(rows)].tolist())


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    norm = float(np.linalg.norm(one))
    with np.errstate(invalid="ignore"):
        apart = float(np.linalg.norm(one - other))
    if not np.isfinite(apart):
        return float("inf")
    return apart / norm if norm else (float("inf") if apart else 0.0)


def layout_finding(unjoined: Unjoined) -> Finding:
    """Return the finding of a record whose ranks hold some elements several times, or some not at all."""
    covering = unjoined.plan.covering
    parts = []
    if covering.missing:
        parts.append(f"{covering.missing:,} of {covering.elements:,} elements are on no rank ({_box(covering.gap)})")
    if covering.doubled:
        parts.append(f"{covering.doubled:,} of {covering.elements:,} are on several ({_box(covering.overlap)})")
    side = "" if unjoined.side == "candidate" else f" in the {unjoined.side}"
    return Finding(
        key=unjoined.key,
        rank=unjoined.ranks[0],
        cls=unjoined.cls,
        status="layout",
        cause=Cause.LAYOUT,
        difference=None,
        tolerance=0.0,
        rule="the parts of a tensor cover it once",
        inputs_matched=None,
        layout=LayoutFact("", unjoined.ranks, len(unjoined.ranks), " and ".join(parts) + side),
    )


def unreduced_sums(joined: JoinedSource) -> Iterator[tuple[Finding, int]]:
    """Yield records whose ranks hold summands, while the same records of other layers are reduced; each with its row.

    Without placements, a sum that is right could be meant. If other layers hold the sum on every rank, it is not.
    """
    layout = joined.layout
    sums = layout.where(np.array([plan.guessed and bool(plan.reductions) for plan in layout.plans], bool)).tolist()
    forward = [group for group in sums if layout.spot(group)[2] == "output"]
    if not forward:
        return
    whole = layout.where(np.array([not plan.unknown and not plan.is_joined for plan in layout.plans], bool)).tolist()
    reduced = {_pattern(layout, group) for group in whole if len(layout.members(group)) > 1}
    seen: set[str] = set()
    for group in forward:
        module = layout.spot(group)[1]
        if _pattern(layout, group) not in reduced or module in seen:
            continue
        seen.add(module)
        ranks = tuple(layout.pieces.rank[layout.members(group)].tolist())
        fact = LayoutFact(
            layout.plan_of(group).reductions[0][0], ranks, len(ranks), "their sum is the reference's output"
        )
        yield (
            Finding(
                *(Key(*key_of(layout, group)), ranks[0], "", "diverged", Cause.MISSING_REDUCTION, None, 0.0),
                rule="other layers hold the sum on every rank",
                inputs_matched=None,
                layout=fact,
            ),
            joined.row_of.get(group, 0),
        )


def _pattern(layout: Layout, group: int) -> tuple[str, ...]:
    """Return phase, module, kind and path of a group, without the numbers in its module's name."""
    phase, module, kind, path = layout.spot(group)
    return phase, re.sub(r"\d+", "*", module), kind, path


def _box(extent: Extent | None) -> str:
    """Return a block as indices, like [0:4, 8:16]."""
    return "[" + ", ".join(f"{begin}:{begin + length}" for begin, length in extent or ()) + "]"

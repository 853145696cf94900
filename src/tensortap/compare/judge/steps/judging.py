"""Judge whole steps: the tolerances of most pairs in columns, and the others one by one.

A pair with a wrong source needs no tolerance, and one whose sources are right has a tolerance that does not depend on
how these were judged. So tolerances are worked out for a whole step at once; then pairs are gone through in
execution order, to see which have a wrong source. If nothing is wrong in a step, even that is left out.

Some tolerances depend on pairs that are not sources: on the worst output before, or on all gradients of a step. These
count as right, too, and a pair is judged one by one if one of them turned out to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Ints
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.judging import CallsWithoutGradient, PairJudge, are_nearly
from tensortap.compare.judge.pairs import Floats, Pairs
from tensortap.compare.judge.rules.evidence import Evidence
from tensortap.compare.judge.rules.names import ROUNDING, UNSEEN_PARAMETERS
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.steps.chunks import ALONE, COPIED, RIGHT, UNLESS_WRONG, Chunk, StepPart
from tensortap.compare.judge.steps.facts import FOLLOWED, KINDS_WITH_FACTS, SEEN, UNSEEN
from tensortap.compare.judge.steps.tolerances import set_tolerances
from tensortap.compare.judge.structure import Structure

__all__ = ["StepJudge", "judge"]

_AT_ONCE = 1 << 15
"""Pairs whose tolerances are worked out together, which bounds memory."""

_FEW = 16
"""Pairs up to which they are judged in order, even if all are right."""

_NONE_LACK = CallsWithoutGradient()


@dataclass
class _Progress:
    """Counts of events since the tolerances of a chunk were computed."""

    lacking: int
    """Number of calls without a gradient that are taken into account."""
    wrong_gradients: int
    """Number of gradients of parameters that were wrong at the beginning."""
    lately: Set[int] = frozenset()
    """Gradients that calls made which lack one, as was found since."""
    has_judged: bool = False
    """Whether any pair was judged by itself, or is wrong: what tolerances assume may no longer be so."""


class StepJudge(PairJudge):
    """Judges steps in columns where it can."""

    def judge_open(self, rows: Ints) -> None:
        is_renamed = not self.structure.has_facts
        if is_renamed or self.evidence.policy.fixed or self.pairs.isolated is not None:
            super().judge_open(rows)
            return
        parts: list[StepPart] = []
        for number, own in self.structure.by_step(rows):
            begin, facts = self.structure.facts(number)
            for at in range(0, len(own), _AT_ONCE):
                parts.append(StepPart.of(own[at : at + _AT_ONCE], number, begin, facts))
                if sum(len(part.rows) for part in parts) >= _AT_ONCE:
                    self._judge_chunk(self._chunk(parts))
                    parts = []
        if parts:
            self._judge_chunk(self._chunk(parts))

    # --- columns ----------------------------------------------------------------------------------------------------
    def _chunk(self, parts: Sequence[StepPart]) -> Chunk:
        """Work out how pairs are judged, as if all sources were right."""
        chunk = Chunk.of(parts, self.pairs)
        rows = chunk.rows
        first = self._first_seen[rows]
        known = (first < rows) & self.open[first]
        propagated = np.frombuffer(self.evidence.propagated)
        copied = known & are_nearly(self.pairs.error[rows], propagated[first])
        set_tolerances(chunk, self.evidence, self.worst_outputs, copied)
        chunk.ways[self._are_special(chunk)] = ALONE
        offset = 0
        for part in parts:
            if part.facts.sent:
                chunk.ways[[offset + place for place in self._with_other_sources(part)]] = ALONE
            offset += len(part.rows)
        chunk.ways[np.isin(rows, [*self._lacking_gradients(parts)])] = ALONE
        chunk.ways[copied] = COPIED
        if self.ties:
            chunk.ways[known & np.array([each in self.ties for each in first.tolist()], bool)] = ALONE
        return chunk

    def _are_special(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        """Return which pairs must be judged one by one, even if a source is wrong."""
        words, codes = self.structure.kind_words, self.structure.kind_codes[chunk.rows]
        found = ~np.array([word in KINDS_WITH_FACTS for word in words], bool)[codes]
        found |= (chunk.flags & (UNSEEN | SEEN)) != 0
        is_state = np.array([word in ("param", "step_grad") for word in words], bool)[codes]
        found |= is_state & ((chunk.flags & FOLLOWED) != 0)
        if self.pairs.masks:
            found |= np.isin(chunk.rows, list(self.pairs.masks))
        for rows in (self.pairs.other_gelus, self.pairs.made_unseen):
            if rows:
                found |= np.isin(chunk.rows, list(rows))
        if self.pairs.choices is not None:
            found |= self.structure.integers[chunk.rows]
        return found

    def _with_other_sources(self, part: StepPart) -> list[int]:
        """Return the places of gradients to which the code around sends more than the users of the output do."""
        begin, found = part.begin, []
        for place, row in enumerate(part.rows.tolist()):
            sent = part.facts.sent.get(row - begin)
            if sent and self.structure.is_used_around(row, [begin + source for source in sent]):
                found.append(place)
        return found

    def _lacking_gradients(self, parts: Sequence[StepPart]) -> set[int]:
        """Return the gradients of steps that `_calls_that_lack_a_gradient` has calls of. Those whose tensors were seen
        before are left out: they are judged alike, or one by one."""
        without, send_none, structure = self.calls_without_gradient, self.calls_that_send_none, self.structure
        if not without and not send_none:
            return set()
        concerned = {spot[0][:2] for spot in chain(without, send_none)}
        found: set[int] = set()
        for number, begin in dict.fromkeys((part.number, part.begin) for part in parts):
            if not structure.is_one_step and structure.scope[begin][:2] not in concerned:
                continue
            makers = structure.gradient_makers(number)
            spots = [(call, structure.spot_of(begin + call)) for call in makers.all_calls]
            rows = makers.made_by(
                [call for call, spot in spots if spot in without], [call for call, spot in spots if spot in send_none]
            )
            found.update((rows + begin).tolist())
        return found

    @cached_property
    def _first_seen(self) -> Ints:
        return np.asarray(self.structure.first_seen)

    # --- verdicts ---------------------------------------------------------------------------------------------------
    def _judge_chunk(self, chunk: Chunk) -> None:
        self.evidence.discounted.clear()
        progress = _Progress(len(self.calls_without_gradient), self.wrong_so_far.gradients)
        begin = 0
        for alone in [*np.flatnonzero(chunk.ways < RIGHT).tolist(), len(chunk.rows)]:
            if alone - begin > _FEW and self._is_all_right(chunk, progress, begin, alone):
                self._accept(chunk, begin, alone)
                begin = alone
            self._judge_in_order(chunk, progress, begin, min(alone + 1, len(chunk.rows)))
            begin = alone + 1

    def _is_all_right(self, chunk: Chunk, progress: _Progress, begin: int, end: int) -> bool:
        """Whether pairs, which are right as long as their sources are, are all right."""
        wrong, counts = np.frombuffer(self.evidence.wrong, np.uint8), chunk.counts[begin:end]
        sources = chunk.sources[chunk.ends[begin] - counts[0] : chunk.ends[end - 1]]
        if wrong[sources].any() or self.evidence.discounted or len(self.calls_without_gradient) > progress.lacking:
            return False
        may_follow = bool(self.wrong_so_far) and not counts.all()
        if may_follow or progress.lately:
            return False
        if not progress.has_judged:  # so what tolerances assume is so
            return True
        substitutes = chunk.substitutes[begin:end]
        if wrong[substitutes[substitutes >= 0]].any() or not np.isnan(chunk.worst_right[begin:end]).all():
            return False
        return self.wrong_so_far.gradients == progress.wrong_gradients or not chunk.needs_gradients[begin:end].any()

    def _accept(self, chunk: Chunk, begin: int, end: int) -> None:
        """Call pairs right."""
        places = begin + np.flatnonzero(chunk.ways[begin:end] == RIGHT)
        rows = chunk.rows[places]
        np.frombuffer(self.tolerance)[rows] = chunk.allowed[places]
        names, rules = chunk.names, chunk.rules[places].tolist()
        for row, rule in zip(rows.tolist(), rules, strict=True):
            self.status[row], self.rule[row] = "close", names[rule]
        self._note_right(chunk, places)
        copied = chunk.rows[begin + np.flatnonzero(chunk.ways[begin:end] == COPIED)]
        firsts = self._first_seen[copied]
        if self.ties:
            for row, first in zip(copied.tolist(), firsts.tolist(), strict=True):
                self._copy_judgement(row, first)
            return
        np.frombuffer(self.tolerance)[copied] = np.frombuffer(self.tolerance)[firsts]
        status, rule = self.status, self.rule
        for row, first in zip(copied.tolist(), firsts.tolist(), strict=True):  # none is wrong: they are sources
            status[row], rule[row] = status[first], rule[first]

    def _call_right(self, chunk: Chunk, place: int, row: int) -> None:
        self.status[row], self.rule[row] = "close", chunk.names[chunk.rules[place]]
        self.tolerance[row] = chunk.allowed[place]
        if self.rule[row] == UNSEEN_PARAMETERS and self.evidence.error[row] > chunk.recorded[place]:
            self._unsupported.add(row)
        if self.structure.kind[row] == "param_grad":
            self.evidence.summed.add_right_gradient(row, self.evidence.error[row])

    def _note_right(self, chunk: Chunk, places: Ints) -> None:
        """Note what later pairs, and the verdict, need to know about right ones."""
        rows, error = chunk.rows[places], self.pairs.error[chunk.rows[places]]
        unseen = np.array([name == UNSEEN_PARAMETERS for name in chunk.names], bool)[chunk.rules[places]]
        self._unsupported.update(rows[unseen & (error > chunk.recorded[places])].tolist())
        is_gradient = np.array([word == "param_grad" for word in self.structure.kind_words], bool)
        summed = is_gradient[self.structure.kind_codes[rows]] & (self.pairs.dimensions[rows] > 1)
        if summed.any():
            scopes = np.searchsorted(self.structure.scope_begins, rows[summed], side="right")
            begins = np.flatnonzero(np.diff(scopes, prepend=-1))
            worst = np.maximum.reduceat(error[summed], begins)
            for row, each in zip(rows[summed][begins].tolist(), worst.tolist(), strict=True):
                self.evidence.summed.add_right_gradient(row, each)

    def _judge_in_order(self, chunk: Chunk, progress: _Progress, begin: int, end: int) -> None:
        """Go through pairs, of which some have a wrong source or must be judged one by one."""
        wrong, discounted = self.evidence.wrong, self.evidence.discounted
        first_seen, is_wrong = self.structure.first_seen, wrong.__getitem__
        sources, ends = chunk.source_list, chunk.end_list
        after = ends[begin - 1] if begin else 0
        for place in range(begin, end):
            row, way, before, after = chunk.row_list[place], chunk.way_list[place], after, ends[place]
            own = sources[before:after]
            if len(self.calls_without_gradient) > progress.lacking:
                progress.lacking = len(self.calls_without_gradient)
                progress.lately = self._lacking_gradients(chunk.parts)
            if way == COPIED and first_seen[row] not in discounted:
                self._copy_judgement(row, first_seen[row])
                progress.has_judged = progress.has_judged or bool(wrong[row])
            elif way in (ALONE, COPIED) or row in progress.lately:
                self._judge_alone(row, progress)
            elif any(map(is_wrong, own)) or (not own and self.wrong_so_far and self.wrong_so_far.may_reach(row)):
                # That is the only reason, so it needs no tolerance.
                progress.has_judged = True
                self.rule[row] = ROUNDING
                self.status[row] = "diverged"
                if self._is_broken[row]:
                    self.status[row] = "shape" if self.pairs.reshaped[row] else "nonfinite"
                self._mark_wrong(row)
            elif (
                way == UNLESS_WRONG
                or (discounted and not discounted.isdisjoint(own))
                or (chunk.assumes[place] and not self._holds(chunk, place, row, progress.wrong_gradients))
            ):
                self._judge_alone(row, progress)
            else:
                self._call_right(chunk, place, row)

    def _judge_alone(self, row: int, progress: _Progress) -> None:
        progress.has_judged = True
        self.judge_pair(row)

    def _holds(self, chunk: Chunk, place: int, row: int, wrong_gradients: int) -> bool:
        """Whether what a tolerance assumes about pairs that are no sources is so.

        wrong_gradients: how many gradients of parameters were wrong when the tolerance was worked out.
        """
        if chunk.needs_gradients[place] and self.wrong_so_far.gradients > wrong_gradients:
            return False
        substitute = int(chunk.substitutes[place])
        if substitute >= 0 and (self.evidence.wrong[substitute] or substitute in self.evidence.discounted):
            return False
        assumed = chunk.worst_right[place]
        return bool(np.isnan(assumed) or self.evidence.summed.worst_right(row) == assumed)


def judge(
    pairs: Pairs,
    structure: Structure,
    policy: Policy,
    reference_moved: Callable[[Ints, Ints], Floats],
    without_gradient: CallsWithoutGradient = _NONE_LACK,
) -> Judgement:
    """Judge all pairs in execution order.

    reference_moved: how far apart records of the reference are, relative to the first ones, by rows.
    without_gradient: see `missing_gradients.find_calls_without_gradient`.
    """
    return StepJudge(Evidence(pairs, structure, policy, reference_moved), without_gradient).run()

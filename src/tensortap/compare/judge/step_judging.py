"""Judge whole steps: the tolerances of most pairs in columns, and the others one by one.

A pair with a wrong source needs no tolerance, and one whose sources are right has a tolerance that does not depend on
how these were judged. So tolerances are worked out for a whole step at once; then pairs are gone through in
execution order, to see which have a wrong source. If nothing is wrong in a step, even that is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.judging import CallsWithoutGradient, Judgement, PairJudge, are_nearly
from tensortap.compare.judge.pairs import Floats, Pairs
from tensortap.compare.judge.rules import MOST_ASSUMED, ROUNDING, UNSEEN_PARAMETERS, find_tolerances
from tensortap.compare.judge.rules.columns import PairColumns
from tensortap.compare.judge.rules.evidence import Evidence
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.step_facts import KINDS_WITH_FACTS, SEEN, UNSEEN, StepFacts
from tensortap.compare.judge.structure import Ints, Structure
from tensortap.core.records import GRADIENT_KINDS

__all__ = ["StepJudge", "judge"]

_AT_ONCE = 1 << 15
"""Pairs whose tolerances are worked out together, which bounds memory."""
_FLOWING = ("input", "output", "grad_output", "grad_input")

_NONE_LACK = CallsWithoutGradient()

_ALONE, _UNLESS_WRONG, _RIGHT, _COPIED = range(4)
"""How a pair is judged: one by one; one by one, unless a source is wrong; right, unless a source is wrong; as the first
record of the same tensor."""


@dataclass(frozen=True)
class _Part:
    """Some open pairs of one step, and their facts."""

    rows: Ints
    begin: int
    """The first row of the step."""
    facts: StepFacts
    sources: Ints
    counts: Ints
    flags: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, rows: Ints, begin: int, facts: StepFacts) -> _Part:
        own = rows - begin
        starts = facts.begins[own]
        counts = facts.begins[own + 1] - starts
        places = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        return cls(rows, begin, facts, facts.sources[places].astype(np.int64) + begin, counts, facts.flags[own])


@dataclass
class _Chunk:
    """Some open pairs, and what was worked out about them in columns."""

    rows: Ints
    sources: Ints
    """Of all pairs, one after the other."""
    counts: Ints
    ways: npt.NDArray[np.uint8]
    allowed: Floats
    recorded: Floats
    rules: npt.NDArray[np.int16]
    """Numbers in `names`."""
    names: list[str]

    @cached_property
    def ends(self) -> Ints:
        return np.cumsum(self.counts)

    def having(self, way: int) -> Ints:
        return np.flatnonzero(self.ways == way)


class StepJudge(PairJudge):
    """Judges steps in columns where it can."""

    def judge_open(self, rows: Ints) -> None:
        is_renamed = not self.structure.has_facts
        if is_renamed or self.evidence.policy.fixed or self.pairs.isolated is not None:
            super().judge_open(rows)
            return
        parts: list[_Part] = []
        for number, own in self.structure.by_step(rows):
            begin, facts = self.structure.facts(number)
            for at in range(0, len(own), _AT_ONCE):
                parts.append(_Part.of(own[at : at + _AT_ONCE], begin, facts))
                if sum(len(part.rows) for part in parts) >= _AT_ONCE:
                    self._judge_chunk(self._chunk(parts))
                    parts = []
        if parts:
            self._judge_chunk(self._chunk(parts))

    # --- columns ----------------------------------------------------------------------------------------------------
    def _chunk(self, parts: Sequence[_Part]) -> _Chunk:
        """Work out the tolerances of pairs, as if all sources were right."""
        rows, sources, counts = (
            np.concatenate(columns) for columns in zip(*((p.rows, p.sources, p.counts) for p in parts), strict=True)
        )
        flags = np.concatenate([part.flags for part in parts])
        chunk = _Chunk(
            *(rows, sources, counts, np.full(len(rows), _UNLESS_WRONG, np.uint8)),
            *(self.pairs.base[rows], self.pairs.base[rows], np.zeros(len(rows), np.int16), [ROUNDING]),
        )
        self._set_tolerances(chunk, flags)
        chunk.ways[self._are_special(rows, flags)] = _ALONE
        offset = 0
        for part in parts:
            if part.facts.sent:
                chunk.ways[[offset + place for place in self._with_other_sources(part)]] = _ALONE
            offset += len(part.rows)
        if self.calls_without_gradient or self.calls_that_send_none:
            chunk.ways[self._lack_gradients(rows)] = _ALONE
        first = self._first_seen[rows]
        known = (first < rows) & self.open[first]
        propagated = np.frombuffer(self.evidence.propagated)
        chunk.ways[known & are_nearly(self.pairs.error[rows], propagated[first])] = _COPIED
        if self.ties:
            chunk.ways[known & np.array([each in self.ties for each in first.tolist()], bool)] = _ALONE
        return chunk

    def _set_tolerances(self, chunk: _Chunk, flags: npt.NDArray[np.uint8]) -> None:
        usual = self._are_usual(chunk)
        owners = np.repeat(np.arange(len(chunk.rows)), chunk.counts)
        codes = self.structure.kind_codes[chunk.rows]
        for code in np.unique(codes[usual]).tolist():
            chosen = usual & (codes == code)
            own = chunk.rows[chosen]
            columns = PairColumns(
                self.evidence,
                self.structure.kind_words[code],
                own,
                chunk.sources[chosen[owners]],
                chunk.counts[chosen],
                flags[chosen],
            )
            found = find_tolerances(columns)
            if found is None:
                continue
            error = self.pairs.error[own]
            right = (error <= found.allowed) & (error <= MOST_ASSUMED) & ~self._broken[own]
            chunk.ways[chosen] = np.where(right, _RIGHT, _UNLESS_WRONG)
            chunk.allowed[chosen], chunk.recorded[chosen] = found.allowed, found.recorded
            chunk.rules[chosen] = found.rules + len(chunk.names)
            chunk.names += found.names

    def _are_usual(self, chunk: _Chunk) -> npt.NDArray[np.bool_]:
        """Return which pairs have all that the rules in columns ask for: known numbers, and sources of some kinds."""
        pairs, structure, rows = self.pairs, self.structure, chunk.rows
        known = self._known
        words, codes = structure.kind_words, structure.kind_codes
        found = np.array([word in KINDS_WITH_FACTS for word in words], bool)[codes[rows]]
        found &= pairs.base[rows] > 0
        if known is not None:
            found &= known[rows] & ~self._any(chunk, ~known[chunk.sources])
        found &= self._any(chunk, np.array([word in _FLOWING for word in words], bool)[codes[chunk.sources]])
        is_gradient = np.array([word == "param_grad" for word in words], bool)[codes[rows]]
        of_outputs = np.array([word == "grad_output" for word in words], bool)[codes[chunk.sources]]
        found &= ~is_gradient | self._any(chunk, of_outputs)
        is_output = np.array([word == "output" for word in words], bool)[codes[rows]]
        return found & (~is_output | self._any(chunk, pairs.base[chunk.sources] > 0))

    @staticmethod
    def _any(chunk: _Chunk, of_sources: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return for each pair whether something is so for any of its sources."""
        total = np.concatenate([[0], np.cumsum(of_sources)])
        return np.asarray(total[chunk.ends] > total[chunk.ends - chunk.counts])

    def _are_special(self, rows: Ints, flags: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return which pairs must be judged one by one, even if a source is wrong."""
        words, codes = self.structure.kind_words, self.structure.kind_codes[rows]
        found = ~np.array([word in KINDS_WITH_FACTS for word in words], bool)[codes]
        found |= (flags & (UNSEEN | SEEN)) != 0
        if self.pairs.masks:
            found |= np.isin(rows, list(self.pairs.masks))
        if self.pairs.other_gelus:
            found |= np.isin(rows, list(self.pairs.other_gelus))
        if self.pairs.choices is not None:
            found |= self.structure.integers[rows]
        return found

    def _with_other_sources(self, part: _Part) -> list[int]:
        """Return the places of gradients to which the code around sends more than the users of the output do."""
        begin, found = part.begin, []
        for place, row in enumerate(part.rows.tolist()):
            sent = part.facts.sent.get(row - begin)
            if sent and self.structure.is_used_around(row, [begin + source for source in sent]):
                found.append(place)
        return found

    def _lack_gradients(self, rows: Ints) -> list[int]:
        kinds = self.structure.kind
        return [
            place
            for place, row in enumerate(rows.tolist())
            if kinds[row] in GRADIENT_KINDS and self._calls_that_lack_a_gradient(row)
        ]

    @cached_property
    def _known(self) -> npt.NDArray[np.bool_] | None:
        """Pairs whose numbers are known; None if all are."""
        unknown = np.isnan(self.pairs.l2) | np.isnan(self.pairs.distance)
        return ~unknown if unknown.any() else None

    @cached_property
    def _broken(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.pairs.reshaped | self.pairs.nonfinite)

    @cached_property
    def _first_seen(self) -> Ints:
        return np.asarray(self.structure.first_seen)

    # --- verdicts ---------------------------------------------------------------------------------------------------
    def _judge_chunk(self, chunk: _Chunk) -> None:
        self.evidence.discounted.clear()
        wrong = np.frombuffer(self.evidence.wrong, np.uint8)
        if (chunk.ways >= _RIGHT).all() and not wrong[chunk.sources].any():
            self._accept(chunk)
        else:
            self._judge_in_order(chunk)

    def _accept(self, chunk: _Chunk) -> None:
        """Call all pairs right, which are right as long as their sources are."""
        right = chunk.having(_RIGHT)
        rows = chunk.rows[right]
        np.frombuffer(self.tolerance)[rows] = chunk.allowed[right]
        names, rules = chunk.names, chunk.rules[right].tolist()
        for row, rule in zip(rows.tolist(), rules, strict=True):
            self.status[row], self.rule[row] = "close", names[rule]
        self._note_right(chunk, right)
        for row in chunk.rows[chunk.having(_COPIED)].tolist():
            self._copy_judgement(row, self.structure.first_seen[row])

    def _call_right(self, chunk: _Chunk, place: int, row: int) -> None:
        self.status[row], self.rule[row] = "close", chunk.names[chunk.rules[place]]
        self.tolerance[row] = chunk.allowed[place]
        if self.rule[row] == UNSEEN_PARAMETERS and self.evidence.error[row] > chunk.recorded[place]:
            self._unsupported.add(row)
        if self.structure.kind[row] == "param_grad":
            self.evidence.summed.add_right_gradient(row, self.evidence.error[row])

    def _note_right(self, chunk: _Chunk, places: Ints) -> None:
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

    def _judge_in_order(self, chunk: _Chunk) -> None:
        """Go through pairs, of which some have a wrong source or must be judged one by one."""
        wrong, discounted = self.evidence.wrong, self.evidence.discounted
        first_seen, is_wrong = self.structure.first_seen, wrong.__getitem__
        sources, begin = chunk.sources.tolist(), 0
        lacking = len(self.calls_without_gradient)
        steps = zip(chunk.rows.tolist(), chunk.ways.tolist(), chunk.ends.tolist(), strict=True)
        for place, (row, way, end) in enumerate(steps):
            own = sources[begin:end]
            begin = end
            if way == _COPIED and first_seen[row] not in discounted:
                self._copy_judgement(row, first_seen[row])
            elif way in (_ALONE, _COPIED) or (
                len(self.calls_without_gradient) > lacking and self._calls_that_lack_a_gradient(row)
            ):
                self.judge_pair(row)
            elif any(map(is_wrong, own)):  # which is the only reason, so it needs no tolerance
                self.rule[row] = ROUNDING
                self.status[row] = "diverged"
                if self._is_broken[row]:
                    self.status[row] = "shape" if self.pairs.reshaped[row] else "nonfinite"
                self._mark_wrong(row)
            elif way == _UNLESS_WRONG or (discounted and not discounted.isdisjoint(own)):
                self.judge_pair(row)
            else:
                self._call_right(chunk, place, row)


def judge(
    pairs: Pairs,
    structure: Structure,
    policy: Policy,
    reference_moved: Callable[[int, int], float],
    without_gradient: CallsWithoutGradient = _NONE_LACK,
) -> Judgement:
    """Judge all pairs in execution order.

    reference_moved: how far apart two records of the reference are, relative to the first.
    without_gradient: see `one_sided.find_calls_without_gradient`.
    """
    return StepJudge(Evidence(pairs, structure, policy, reference_moved), without_gradient).run()

"""The tolerances of the pairs of a chunk, in columns, as if all pairs of the chunk were right."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Ints
from tensortap.compare.judge.pairs import Floats
from tensortap.compare.judge.rules.columns import PairColumns
from tensortap.compare.judge.rules.evidence import Evidence
from tensortap.compare.judge.rules.margins import MOST_ASSUMED
from tensortap.compare.judge.rules.summed_columns import UnrecordedTerms
from tensortap.compare.judge.rules.tolerance import find_tolerances
from tensortap.compare.judge.steps.chunks import RIGHT, UNLESS_WRONG, Chunk
from tensortap.compare.judge.steps.facts import KINDS_WITH_FACTS, SEEN
from tensortap.compare.judge.worst_outputs import WorstOutputs

__all__ = ["set_tolerances"]

Bools = npt.NDArray[np.bool_]
_FLOWING = ("input", "output", "grad_output", "grad_input")


def set_tolerances(chunk: Chunk, evidence: Evidence, worst_outputs: WorstOutputs, copied: Bools) -> None:
    """Set tolerances, rules and ways of the pairs whose tolerances are known in columns.

    copied: which pairs are judged as the first record of the same tensor.
    """
    _ToleranceSetter(chunk, evidence, copied).set(worst_outputs)


class _ToleranceSetter:
    def __init__(self, chunk: Chunk, evidence: Evidence, copied: Bools) -> None:
        self.chunk, self.evidence, self.copied = chunk, evidence, copied
        self.pairs, self.structure = evidence.pairs, evidence.structure
        self.kinds = self.structure.kind_codes[chunk.rows]
        self.kinds_of_sources = self.structure.kind_codes[chunk.sources]

    def set(self, worst_outputs: WorstOutputs) -> None:
        chunk = self.chunk
        lacking = self._is(self.kinds, "param_grad") & ((chunk.flags & SEEN) == 0)
        lacking &= ~chunk.any_source(self._is(self.kinds_of_sources, "grad_output"))
        self._substitute(worst_outputs)
        usual = self._are_usual(lacking)
        for code in np.unique(self.kinds[usual]).tolist():
            kind = self.structure.kind_words[code]
            of_kind = usual & (self.kinds == code)
            chosen = of_kind & ~lacking
            if chosen.any():
                self._set(chosen, PairColumns(self.evidence, kind, *self._columns(chosen)))
                chunk.needs_gradients[chosen] = kind in ("param", "step_grad")
            chosen = of_kind & lacking
            if chosen.any():
                worst = self._worst_right()[chosen]
                chunk.worst_right[chosen] = worst
                columns, summed = self._columns(chosen), chunk.summed(chosen)
                self._set(chosen, UnrecordedTerms(self.evidence, kind, *columns, *summed, worst))

    def _set(self, chosen: Bools, columns: PairColumns) -> None:
        found, chunk = find_tolerances(columns), self.chunk
        if found is None:
            return
        error = self.pairs.error[columns.rows]
        broken = self.pairs.reshaped[columns.rows] | self.pairs.nonfinite[columns.rows]
        right = (error <= found.allowed) & (error <= MOST_ASSUMED) & ~broken
        chunk.ways[chosen] = np.where(right, RIGHT, UNLESS_WRONG)
        chunk.allowed[chosen], chunk.recorded[chosen] = found.allowed, found.recorded
        chunk.rules[chosen] = found.rules + len(chunk.names)
        chunk.names += found.names

    def _columns(self, chosen: Bools) -> tuple[Ints, Ints, Ints, npt.NDArray[np.uint8], int]:
        """Return the columns that `PairColumns` has of some pairs. Substitutes are sources, too."""
        chunk = self.chunk
        owners = np.repeat(np.arange(len(chunk.rows)), chunk.counts)
        sources, counts = chunk.sources[chosen[owners]], chunk.counts[chosen]
        substitutes = chunk.substitutes[chosen]
        having = substitutes >= 0
        if having.any():
            sources = np.insert(sources, np.cumsum(counts)[having], substitutes[having])
            counts = counts + having
        return chunk.rows[chosen], sources, counts, chunk.flags[chosen], int(chunk.rows[0])

    def _substitute(self, worst_outputs: WorstOutputs) -> None:
        """Let the worst output before a pair stand in for sources that were not recorded."""
        chunk = self.chunk
        outside = self._is(self.kinds, "param", "buffer", "step_grad")
        outside |= self._is(self.kinds, "input") & self.structure.are_at_root(chunk.rows)
        meant = ~outside & ~chunk.any_source(self._is(self.kinds_of_sources, *_FLOWING))
        if meant.any():
            chunk.substitutes[meant] = worst_outputs.before_all(chunk.rows[meant], int(chunk.rows[0]))

    def _worst_right(self) -> Floats:
        """Return for each pair the worst error of the gradients of matrices before it, of its scope."""
        chunk, structure = self.chunk, self.structure
        meant = self._is(self.kinds, "param_grad") & (self.pairs.dimensions[chunk.rows] > 1) & ~self.copied
        errors = np.where(meant, self.pairs.error[chunk.rows], 0.0)
        found = np.zeros(len(errors))
        begins = np.flatnonzero(np.diff(np.searchsorted(structure.scope_begins, chunk.rows, "right"), prepend=-1))
        worst: dict[tuple[int, int, int], float] = {}
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(errors)], strict=True):
            row = int(chunk.rows[begin])
            first = worst.get(structure.scope[row], self.evidence.summed.worst_right(row))
            so_far = np.maximum.accumulate(np.concatenate([[first], errors[begin:end]]))
            found[begin:end], worst[structure.scope[row]] = so_far[:-1], float(so_far[-1])
        return found

    def _are_usual(self, lacking: Bools) -> Bools:
        """Return which pairs have all that the rules in columns ask for: known numbers, and floats among the sources of
        outputs."""
        chunk, pairs = self.chunk, self.pairs
        found = self._is(self.kinds, *KINDS_WITH_FACTS) & (pairs.base[chunk.rows] > 0)
        if (unknown := self.evidence.unknown) is not None:
            found &= ~unknown[chunk.rows] & ~chunk.any_source(unknown[chunk.sources])
            found &= (chunk.substitutes < 0) | ~unknown[chunk.substitutes]
            found[lacking] &= self._know_own(unknown, lacking)
        if self.structure.has_state:
            floats = chunk.any_source(pairs.base[chunk.sources] > 0)
            floats |= (chunk.substitutes >= 0) & (pairs.base[chunk.substitutes] > 0)
            found &= ~self._is(self.kinds, "output") | floats
            if pairs.keeps_gradients:  # one by one, few of them are read
                found &= ~self._is(self.kinds, "param")
            parameters = np.flatnonzero(found & self._is(self.kinds, "param"))
            rows = chunk.rows[parameters].tolist()
            alone = [pairs.is_set_differently(row) or pairs.is_orthogonalized(row) for row in rows]
            found[parameters[np.array(alone, bool)]] = False
        return found

    def _know_own(self, unknown: Bools, lacking: Bools) -> Bools:
        """Return for pairs without gradients at outputs whether the numbers of all gradients of their modules are
        known."""
        (rows, counts), *_ = self.chunk.summed(lacking)
        owners = np.repeat(np.arange(len(counts)), counts)
        return np.asarray(np.bincount(owners[unknown[rows]], minlength=len(counts)) == 0)

    def _is(self, codes: Ints, *kinds: str) -> Bools:
        found: Bools = np.array([word in kinds for word in self.structure.kind_words], bool)[codes]
        return found

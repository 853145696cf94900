"""The worst right output before a record: it stands in for inputs that were not recorded, which may be as far off."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from tensortap.compare.align.side import Ints
from tensortap.compare.judge.rules.evidence import Evidence

__all__ = ["WorstOutputs"]

_Scope = tuple[int, int, int]
_FEW = 32
"""Outputs up to which they are noted one by one."""


class WorstOutputs:
    """By rank, step and micro step: the output with the largest error of all that are right so far."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._structure = evidence.structure
        self._worst: dict[_Scope, int] = {}
        self._passed = 0
        """Number of outputs that are in `_worst`, or wrong."""
        self._outputs: Ints = np.empty(0, np.int64)
        if len(evidence.error):
            is_output = np.array([word == "output" for word in self._structure.kind_words], bool)
            known = ~np.isnan(evidence.pairs.error)
            self._outputs = np.flatnonzero(is_output[self._structure.kind_codes] & known)
        self._numbers: Sequence[int] = np.ascontiguousarray(self._outputs, np.int64).data

    def before(self, row: int) -> int | None:
        """Return the worst right output of a row's own scope before it; all rows before it must be judged."""
        self._pass(row)
        return self._worst.get(self._structure.scope[row])

    def before_all(self, rows: Ints, judged: int) -> Ints:
        """Return for each row, in order, the worst output before it, -1 without one. All rows before `judged` must be
        judged; those from there on count as right."""
        self._pass(judged)
        found = np.full(len(rows), -1, np.int64)
        worst = dict(self._worst)
        for scope, begin, end in self._scopes(judged, int(rows[-1]) + 1):
            first = worst.get(scope, -1)
            outputs, which = self._running(begin, end, first)
            here = slice(*np.searchsorted(rows, [begin, end]).tolist())
            before = np.searchsorted(outputs, rows[here])
            found[here] = np.concatenate([[first], which])[before]
            if len(which):
                worst[scope] = int(which[-1])
        return found

    def _running(self, begin: int, end: int, first: int) -> tuple[Ints, Ints]:
        """Return the outputs of some rows, and the worst one of each and those before it: the first of equal ones."""
        outputs = self._outputs[slice(*np.searchsorted(self._outputs, [begin, end]).tolist())]
        errors = np.asarray(self._evidence.pairs.error)[outputs]
        least = -np.inf if first < 0 else self._evidence.error[first]
        so_far = np.maximum.accumulate(np.concatenate([[least], errors]))
        last = np.maximum.accumulate(np.where(errors > so_far[:-1], np.arange(len(errors)), -1))
        return outputs, np.where(last < 0, first, outputs[last]) if len(outputs) else outputs

    def _pass(self, row: int) -> None:
        """Note all right outputs before a row."""
        begin, end = self._passed, bisect_left(self._numbers, row, self._passed)
        if end <= begin:
            return
        self._passed = end
        wrong = self._evidence.wrong
        if end - begin < _FEW:
            for output in self._numbers[begin:end]:
                if not wrong[output]:
                    self._note(self._structure.scope[output], output)
            return
        outputs = self._outputs[begin:end]
        outputs = outputs[np.frombuffer(wrong, np.uint8)[outputs] == 0]
        errors = np.asarray(self._evidence.pairs.error)[outputs]
        for scope, first, last in self._scopes(int(outputs[0]), int(outputs[-1]) + 1) if len(outputs) else ():
            here = slice(*np.searchsorted(outputs, [first, last]).tolist())
            if here.start < here.stop:
                self._note(scope, int(outputs[here][np.argmax(errors[here])]))

    def _note(self, scope: _Scope, output: int) -> None:
        worst = self._worst.get(scope)
        if worst is None or self._evidence.error[output] > self._evidence.error[worst]:
            self._worst[scope] = output

    def _scopes(self, begin: int, end: int) -> Iterator[tuple[_Scope, int, int]]:
        """Yield the scopes of some rows, and which rows are of each."""
        begins = self._structure.scope_begins
        inner = begins[slice(*np.searchsorted(begins, [begin + 1, end]).tolist())].tolist()
        for first, last in zip([begin, *inner], [*inner, end], strict=True):
            yield self._structure.scope[first], first, last

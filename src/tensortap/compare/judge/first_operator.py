"""Name the operator, inside the module of a finding, where the code of the two sides parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from tensortap.compare.align.side import Names, Side
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure
from tensortap.compare.matched import Matched
from tensortap.core.operator_paths import OperatorPlace, parse_operator
from tensortap.core.records import WRONG_STATUSES, Finding

__all__ = ["with_operators"]


def with_operators(findings: list[Finding], matched: Matched, judgement: Judgement) -> list[Finding]:
    """Return the findings with the first operator that differs, where both sides recorded operators."""
    if matched.operators.own_paths is None or not findings:
        return findings
    structure = matched.structure()
    places = _Places(matched, judgement, structure, matched.operators.own_paths)
    return [replace(each, operator=places.of(each)) for each in findings]


class _Places:
    def __init__(self, matched: Matched, judgement: Judgement, structure: Structure, own: Names) -> None:
        self._matched, self._judgement, self._structure, self._own = matched, judgement, structure, own

    def of(self, finding: Finding) -> OperatorPlace | None:
        call = self._call(finding)
        if call is None:
            return None
        if finding.row is None:
            lost = self._between(call, "backward", None, None, None)[0] if finding.status == "missing" else ()
            return OperatorPlace("", "", float("nan"), lost[:1]) if lost else None
        structure, phase = self._structure, finding.key.phase
        # What the code of a module hands to another one was made before that one is called.
        limit = structure.seq[finding.row] if finding.key.kind == "input" else None
        rows = [row for row in call.of("operator") if structure.phase_of(row) == phase]
        rows = [row for row in rows if limit is None or structure.seq[row] < limit]
        wrong = next((row for row in rows if self._judgement.status[row] in WRONG_STATUSES), None)
        right = [row for row in rows if wrong is None or row < wrong]
        missing, added = self._between(call, phase, right[-1] if right else None, wrong, limit)
        if wrong is None:
            return OperatorPlace("", "", float("nan"), missing, added) if missing or added else None
        own = self._own[int(self._matched.alignment.candidate[wrong])]
        return OperatorPlace(structure.path[wrong], own, float(self._matched.measures.rel_l2[wrong]), missing, added)

    def _call(self, finding: Finding) -> CallRows | None:
        """Return the call of the module to inspect."""
        structure, row = self._structure, finding.row
        own = None if row is None else structure.call_of(row)
        near = [each for each in (own, own and own.parent) if each is not None and each.module == finding.module]
        scope = finding.rank, finding.key.step, finding.key.micro
        return next(iter(near or structure.calls_of_module.get((scope, finding.module), [])), None)

    def _between(
        self, call: CallRows, phase: str, after: int | None, before: int | None, limit: int | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return operators that one side alone has, between two pairs of a call: the reference's, the candidate's."""
        matched, operators = self._matched, self._matched.operators
        sides = (
            (matched.reference, matched.alignment.reference, operators.only_reference.tolist(), matched.reference.path),
            (matched.candidate, matched.alignment.candidate, operators.only_candidate.tolist(), self._own),
        )
        found = []
        for at, (side, rows, only, paths) in enumerate(sides):
            first = -1 if after is None else int(side.seq[rows[after]])
            last = float("inf") if before is None else int(side.seq[rows[before]])
            if before is None and limit is not None:
                last = limit if not at else last
            alone = [row for row in _of_call(side, only, call, phase) if int(side.seq[row]) < last]
            # Code that ran between need not have to do with it: without one there, it is the nearest before.
            here = [row for row in alone if first < int(side.seq[row])] or alone[-1:]
            names = dict.fromkeys(str(parse_operator(paths[row])._replace(part=0)) for row in here)
            found.append(tuple(names))
        return found[0], found[1]


def _of_call(side: Side, rows: Collection[int], call: CallRows, phase: str) -> Iterator[int]:
    _, step, micro = call.scope
    for row in rows:
        same = int(side.micro[row]) == micro and int(side.call[row]) == call.number and side.phase[row] == phase
        if same and side.module[row] == call.module and int(side.step[row]) == step:
            yield row

"""Router ties: choices that rounding decided, and the records that depend on them.

A token that chose another expert changes by a lot, and with it all that is made from it. What differs only there is
right; where that cannot be told, it is unjudged.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensortap.compare.judge.rules.evidence import Evidence
from tensortap.compare.judge.rules.margins import SHORT
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure
from tensortap.compare.measure.choices import ChangedChoice

__all__ = ["FOLLOWS_TIE", "TIE", "TIE_UNKNOWN", "Ties"]

TIE = "few tokens chose another expert, whose score is tied"
TIE_UNKNOWN = "few tokens chose another expert or code; whether their scores are tied is not known"
FOLLOWS_TIE = "it depends on tokens that chose another expert or code"
_FEW, _TIMES, _RARE = 4, 4.0, 2.0**-6
"""Tokens that may choose another expert whatever the scores; per error of these, expert and token; and the number of
ties below which rounding decides none at all."""
_MOST_CHANGED = 1 / 4
"""Share of tokens that may choose another expert, unless most scores are tied."""

_SHORT = 2.0**-10
"""The least rounding of a short dtype."""
_LEAST_EXPERTS = 2


def _experts_beside(call: CallRows, row: int, structure: Structure) -> dict[int, int]:
    """Return by number the modules of a list of which this call is one, each with the row of its own input: those that
    the same code calls once, if this is one of several experts."""
    beside, _, number = call.module.rpartition(".")
    found: dict[int, int] = {}
    for each in call.parent.children if call.parent is not None and number.isdigit() else ():
        around, _, other = each.module.rpartition(".")
        inputs = [each for each in each.of("input") if structure.path[each] == structure.path[row]]
        if around == beside and other.isdigit():
            if each.number or len(inputs) != 1:
                return {}
            found[int(other)] = inputs[0]
    return found


class Ties:
    """The choices that differ, and all rows that depend on them."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.choices: dict[int, ChangedChoice] = {}
        """By row of the choice."""
        self.mistaken: set[int] = set()
        """Rows of choices that their scores do not explain: wrong, by however little."""
        self._of: dict[int, ChangedChoice] = {}
        """By row that depends on one: the first choice."""

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, row: int) -> bool:
        """Whether a row depends on a changed choice."""
        return row in self._of

    def status_of_choice(self, row: int, sources: Sequence[int]) -> tuple[str, str] | None:
        """Return status and rule of a row of choices; None if it is none, or if its difference is no rounding's."""
        evidence = self._evidence
        reader, structure = evidence.pairs.choices, evidence.structure
        if reader is None or evidence.policy.fixed or structure.kind[row] not in ("input", "output"):
            return None
        if not reader.may_be_choice(row):
            return None
        scores = self._scores(row, sources)
        choice = reader.compare(row, scores)
        if choice is None:
            return self._status_of_code(row, sources)
        if choice.tied is False or self._are_ties_rare(choice):
            self.mistaken.add(row)
            return None
        if not choice.tied and choice.changed > self._most(choice, scores):
            return None
        self.choices[row] = choice
        self.add(row, choice)
        return ("close", TIE) if choice.tied else ("unjudged", TIE_UNKNOWN)

    def _scores(self, row: int, sources: Sequence[int]) -> list[int]:
        """Return the rows that a choice may have been made from."""
        structure = self._evidence.structure
        call = structure.call_of(row)
        own = call.of("output") if call is not None and structure.kind[row] == "output" else []
        return [each for each in dict.fromkeys([*own, *sources]) if each < row and self._is_right(each)]

    def _status_of_code(self, row: int, sources: Sequence[int]) -> tuple[str, str] | None:
        """Return status and rule of an output that says which code of a book each token is nearest to, as in vector
        quantization; None if what it was made from is too exact for rounding to decide that much.

        No record has the distances, so that nothing is allowed beyond what the error of the tokens may change.
        """
        evidence, reader = self._evidence, self._evidence.pairs.choices
        if reader is None or evidence.structure.kind[row] != "output":
            return None
        isolated = evidence.pairs.isolated  # there, only a cast moves a token
        given = [each for each in sources if evidence.base[each] > 0 and self._is_right(each)]
        given = [each for each in given if isolated is None or isolated.cast[each]]
        choice = reader.compare_codes(row) if given else None
        if choice is None:
            return None
        most = self._most(choice, given) - _FEW
        if most < _RARE or choice.changed > max(1.0, most):
            return None
        self.choices[row] = choice
        self.add(row, choice)
        return "unjudged", TIE_UNKNOWN

    def status_of_follower(self, row: int, sources: Sequence[int], tolerance: float) -> tuple[str, str] | None:
        """Return status and rule of a row that is off by too much and depends on a changed choice; else None."""
        choice = next((self._of[source] for source in sources if source in self._of), None)
        structure, reader = self._evidence.structure, self._evidence.pairs.choices
        call = structure.call_of(row)
        isolated = self._evidence.pairs.isolated is not None  # no token reaches any other by way of another call
        kinds = ("input", "output") if isolated else ("output",)
        if choice is None and call is not None and structure.kind[row] in kinds:
            pairs = self._evidence.pairs
            shown = row in pairs.shown and float(pairs.base.max()) >= _SHORT
            choice = self._choice_of(call, structure.kind[row], shown)
        if choice is None and call is not None and structure.kind[row] == "input" and not isolated:
            return self._status_of_routed(row, call, sources)
        if choice is None and call is not None and structure.kind[row] == "input":
            choice = self._choice_by_cast(row, call, sources)
        if choice is None and call is not None and structure.kind[row] in ("grad_output", "grad_input"):
            # The gradient of a value that other tokens chose depends on them just as the value does.
            choice = next((self._of[each] for each in call.of("input", "output") if each in self._of), None)
        if choice is None and call is not None and structure.kind[row] in ("grad_output", "grad_input"):
            return self._status_beside_choice(row, call, tolerance)
        if choice is None and isolated and structure.kind[row] == "param_grad":
            # A check leaves gradients of other tokens out: they have another shape.
            given = (each for user in structure.users_of_own(row) for each in user.of("input", "output"))
            choice = next((self._of[each] for each in given if each in self._of), None)
        if choice is None or reader is None:
            return None
        self.add(row, choice)
        if isolated or (structure.kind[row] == "output" and self._is_local(row, sources)):
            rest = reader.error_without(row, choice)
            if rest is not None:
                if rest <= tolerance:
                    return "close", TIE
                del self._of[row]
                return None
        return "unjudged", FOLLOWS_TIE

    def _choice_by_cast(self, row: int, call: CallRows, sources: Sequence[int]) -> ChangedChoice | None:
        """Return a choice that code of a container may have made otherwise, because the reference's scores were cast to
        a shorter dtype in a check; None if it is no input of an expert, or if much of it differs."""
        pairs, structure = self._evidence.pairs, self._evidence.structure
        experts = _experts_beside(call, row, structure)
        if pairs.isolated is None or len(experts) < _LEAST_EXPERTS or not self._evidence.l2[row] > 0:
            return None
        given = [each for each in sources if structure.kind[each] == "output" and pairs.isolated.cast[each]]
        scores = [each for each in given if structure.row_length(each) >= len(experts) and self._is_right(each)]
        size = (float(pairs.candidate_l2[row]) / self._evidence.l2[row]) ** 2
        if (
            not scores
            or not abs(size - 1) <= _MOST_CHANGED
            or max(self._evidence.base[each] for each in scores) < SHORT
        ):
            return None
        tokens = int(pairs.elements[scores[0]]) // max(1, structure.row_length(scores[0]))
        choice = ChangedChoice(tokens, 1, None, experts=len(experts))
        self.choices[row] = choice
        return choice

    def _status_of_routed(self, row: int, call: CallRows, sources: Sequence[int]) -> tuple[str, str] | None:
        """Return status and rule of the input of an expert that code of a container chose, if rounding may have decided
        which tokens it is given; else None."""
        reader, structure = self._evidence.pairs.choices, self._evidence.structure
        experts = _experts_beside(call, row, structure)
        if reader is None or len(experts) < _LEAST_EXPERTS or self._evidence.policy.fixed:
            return None
        if float(self._evidence.pairs.base.max()) < _SHORT:
            return None  # so few tokens are tied that others moved, as positions that see nothing
        others = set(experts.values())
        right = [each for each in sources if self._is_right(each) and each not in others]
        given = [each for each in right if structure.kind[each] == "input"]
        for scores in (each for each in right if structure.kind[each] == "output"):
            choice = reader.compare_routed(experts, scores, given)
            if choice is None or choice.tied is False or self._are_ties_rare(choice):
                continue
            if choice.tied or choice.changed <= self._most(choice, [scores]):
                self.choices[row] = choice
                for each in others:
                    self.add(each, choice)
                return "unjudged", FOLLOWS_TIE if choice.tied else TIE_UNKNOWN
        return None

    def _status_beside_choice(self, row: int, call: CallRows, tolerance: float) -> tuple[str, str] | None:
        """Return status and rule of a gradient that is right but for tokens that chose another expert.

        They did so inside the call, and what it returns may not depend on it, as the weights of a first position, which
        sees itself. Or the code around made the gradient, by way of what it had made of their choice.
        """
        reader, calls = self._evidence.pairs.choices, [call]
        for each in calls:  # and those inside, as the list grows
            calls += each.children
        found = [self.choices[output] for each in calls for output in each.of("output") if output in self.choices]
        beside = [] if call.parent is None else [r for each in call.parent.children for r in each.of("input", "output")]
        found += [self._of[each] for each in beside if each in self._of]
        for choice in found:
            rest = None if reader is None else reader.error_without(row, choice)
            if rest is not None and rest <= tolerance:
                self.add(row, choice)
                return ("unjudged", FOLLOWS_TIE) if choice.tied is None else ("close", TIE)
        return None

    def _choice_of(self, call: CallRows, kind: str, shown: bool) -> ChangedChoice | None:
        """Return a changed choice among the outputs or the inputs of a call; also one that is not judged yet, if its
        tokens are known, so that the others can be judged.

        shown: whether hidden tokens do not explain it, in a short dtype, whose rounding decides many ties.
        """
        reader, pairs = self._evidence.pairs.choices, self._evidence.pairs
        for each in call.of(kind):
            if each in self.choices or reader is None or pairs.equal[each] or not pairs.error[each]:
                continue
            if not reader.may_be_choice(each):
                continue
            sources = self._evidence.structure.sources(each)
            is_code = reader.may_be_code(each) and reader.compare(each, self._scores(each, sources)) is None
            if reader.knows_tokens(each) or shown or is_code:
                self.status_of_choice(each, sources)
        return next((self._of[each] for each in call.of(kind) if each in self.choices), None)

    def add(self, row: int, choice: ChangedChoice) -> None:
        self._of[row] = choice
        self._evidence.discount(row)  # how far off its changed tokens are says nothing about the others

    def copy(self, row: int, first: int) -> None:
        """Let a row of the same tensor depend on the same choice."""
        if first in self._of:
            self.add(row, self._of[first])
            if first in self.choices:
                self.choices[row] = self.choices[first]

    def _is_local(self, row: int, sources: Sequence[int]) -> bool:
        """Whether a row is made in the call that made the choice or was given it: there, tokens do not mix."""
        call = self._evidence.structure.call_of(row)
        if call is None:
            return False
        near = {*call.of("input", "output"), *(r for child in call.children for r in child.of("input", "output"))}
        followed = [source for source in call.of("input") if source in self._of and source not in self.choices]
        return not followed and any(choice in near for choice in self.choices)

    def _is_right(self, row: int) -> bool:
        return self._evidence.is_known(row) and not self._evidence.wrong[row] and row not in self._of

    def _most(self, choice: ChangedChoice, scores: Sequence[int]) -> float:
        """Return how many tokens may choose another expert if it is not known whether their scores are tied."""
        error = max((self._evidence.error[each] for each in scores), default=0.0)
        tied = max((self._tied_share(each) for each in scores), default=0.0)
        few = _FEW + _TIMES * max(error, tied) * choice.experts * choice.tokens
        return min(few, choice.tokens * max(_MOST_CHANGED, min(1.0, tied)))

    def _tied_share(self, row: int) -> float:
        """Return the width of a tie over the size of scores, if these are short: a softmax or sigmoid that rounds ties
        scores that differ by two epsilons, see `choices`. A router that has not learned yet has small scores."""
        evidence = self._evidence
        size = evidence.l2[row] / max(1, int(evidence.pairs.elements[row])) ** 0.5
        return 2 * evidence.base[row] / size if evidence.base[row] >= SHORT and size > 0 else 0.0

    @staticmethod
    def _are_ties_rare(choice: ChangedChoice) -> bool:
        """Whether the scores that choices follow are so exact that rounding decides none of these.

        Something else may decide as well, as the best groups of experts do, but it is made from the same scores.
        """
        if choice.tied or choice.moved is None:
            return False
        return _TIMES * choice.moved * choice.experts * choice.tokens < _RARE

"""From judgements to findings: where a wrong value was born, and which module to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tensortap.compare.judge.judging import Judgement
from tensortap.compare.judge.structure import Call, Structure
from tensortap.core.arguments import ArgumentDifference
from tensortap.core.records import GRADIENT_KINDS, WRONG_STATUSES, Difference, Finding, Key

__all__ = ["Case", "Place", "findings", "place_of", "whatever_is_wrong"]

_MOST = 1000
_NEEDED = {
    "param": ("param_grad",),
    "param_grad": ("grad_output",),
    "grad_input": GRADIENT_KINDS,
    "grad_output": GRADIENT_KINDS,
}
"""By kind: what a sentence says of the sources of such a record is about these."""


@dataclass(frozen=True)
class Place:
    """Whose doing a wrong row is: another module than the record's own, or None for its own."""

    container: str | None
    inputs_matched: bool | None
    unjudged: tuple[int, ...] = ()
    """Rows that the value was made from and that could not be judged."""
    enters: bool = False
    """Whether it is a gradient that the code outside the model has made, as the loss does."""


@dataclass(frozen=True)
class Case:
    """What was judged, and how findings tell of it. The functions take a pair."""

    judgement: Judgement
    structure: Structure
    key: Callable[[int], Key]
    cls: Callable[[int], str]
    difference: Callable[[int], Difference | None]
    theirs: Mapping[str, str]
    """The candidate's names of modules, where they differ."""
    others: Callable[[int], tuple[ArgumentDifference, ...]]
    """In which plain arguments the calls differ that a pair is of."""
    maker: Callable[[int], str | None] = lambda pair: None
    """The module that made an argument, where the code around it is known not to have."""

    def births(self) -> list[int]:
        """The earliest first."""
        structure = self.structure
        return sorted(self.judgement.born, key=lambda row: (structure.scope[row][1], structure.seq[row]))

    def blamed(self, row: int, place: Place) -> str:
        return self.structure.module[row] if place.container is None else place.container

    def finding(self, row: int, place: Place, born: int) -> Finding:
        """OpaqueValue of one row, though it may have been born in another."""
        judgement = self.judgement
        return Finding(
            key=self.key(row),
            rank=self.structure.scope[row][0],
            cls=self.cls(row),
            status=judgement.status[row],
            difference=self.difference(row),
            tolerance=float(judgement.tolerance[row]),
            row_tolerance=float(judgement.row_tolerance[row]),
            rule=judgement.rule[row],
            inputs_matched=place.inputs_matched,
            unjudged=tuple(self.key(source) for source in place.unjudged),
            enters=place.enters,
            container=place.container if place.container != self.structure.module[row] else None,
            inputs_rel_l2=judgement.sources_error.get(born, float("nan")),
            counterpart=self.theirs.get(self.blamed(row, place)),
            arguments=self._arguments(row, place),
        )

    def _arguments(self, row: int, place: Place) -> tuple[ArgumentDifference, ...]:
        """In which plain arguments the call differs whose doing it is."""
        structure, module = self.structure, self.blamed(row, place)
        kind, own = structure.kind[row], structure.call_of(row)
        if kind in ("param", "buffer") or (kind == "input" and place.container is None):
            return ()  # no call made it
        near = [call for call in (own, own and own.parent) if call is not None and call.module == module]
        calls = near[:1] or structure.calls_of_module.get((structure.scope[row], module), [])
        return next((found for call in calls if (found := self.others(next(iter(call.rows.values()))[0]))), ())


def place_of(row: int, structure: Structure, judgement: Judgement) -> Place:
    """Attribute a wrong value to the module whose own code made it."""
    kind = structure.kind[row]
    call = structure.call_of(row)
    if kind == "input":
        around = call.parent if call is not None else None
        return Place(None, None) if around is None else Place(around.module, *_made_from(row, structure, judgement))
    if kind == "grad_output" and structure.at_root(row) is not None:
        return Place(None, None, enters=True)
    if kind == "grad_output" and call is not None:
        outer = structure.outermost(row, call)
        if outer.parent is None and not structure.users(row, call):  # as the root's: the loss has made it
            return Place(outer.module, None, enters=True)
        return Place(_sender(row, call, structure, judgement), *_made_from(row, structure, judgement))
    return Place(None, *_made_from(row, structure, judgement))


def _made_from(row: int, structure: Structure, judgement: Judgement) -> tuple[bool | None, tuple[int, ...]]:
    """Whether what a row was made from is right, None if nothing of it could be judged; and what could not be. Of a
    gradient or a parameter, only the gradients count that it was made from."""
    sources, needed = structure.sources(row), _NEEDED.get(structure.kind[row])
    if needed is not None:
        sources = [source for source in sources if structure.kind[source] in needed]
    unjudged = {structure.tensor[s]: s for s in reversed(sources) if judgement.status[s] == "unjudged"}
    judged = any(judgement.status[source] != "unjudged" for source in sources)
    return True if judged else None, tuple(reversed(unjudged.values()))


def _sender(row: int, call: Call, structure: Structure, judgement: Judgement) -> str | None:
    """Whose backward made the gradient at a call's output."""
    users = structure.users(row, call)
    if not users:
        around = structure.outermost(row, call).parent
        return None if around is None else around.module
    wrong = [user for user in users if any(_is_wrong(r, judgement) for r in _own_gradients(user, structure))]
    if len(wrong) == 1:
        return wrong[0].module
    # A module whose own parameters got the right gradient has most likely sent the right one back, too. What is left
    # is the code around, which used the same value beside it.
    clean = [user for user in users if _own_gradients(user, structure) and user not in wrong]
    suspects = [user for user in users if user not in clean]
    if len(suspects) == 1:
        return suspects[0].module
    return _above_the_right_ones(row, call, structure, judgement)


def _above_the_right_ones(row: int, call: Call, structure: Structure, judgement: Judgement) -> str:
    """The innermost module around all users of a call's output, but for those that were given that output themselves
    and are known to have sent the right gradient back."""
    users, tensors = structure.users(row, call), structure.returned(row, call)
    named = _common([user.module for user in users], [user.parent for user in users])
    around = next((user.parent for user in users if user.parent is not None and user.parent.module == named), None)
    while around is not None and around.parent is not None:
        paths = {structure.path[r] for r in around.of("input") if structure.tensor[r] in tensors}
        sent = [r for r in around.of("grad_input") if structure.path[r] in paths]
        if not sent or any(_is_wrong(r, judgement) for r in sent):
            break
        around = around.parent
        named = around.module
    return named


def _own_gradients(call: Call, structure: Structure) -> list[int]:
    return structure.own_gradients.get((call.scope, call.module), []) + call.of("grad_input")


def _is_wrong(row: int, judgement: Judgement) -> bool:
    return judgement.status[row] in WRONG_STATUSES


def _within(module: str, other: str) -> bool:
    return not other or module.startswith(f"{other}.")


def _common(modules: list[str], parents: list[Call | None]) -> str:
    """The innermost module around all of them."""
    names = [parent.module if parent is not None else "" for parent in parents]
    parts = [name.split(".") if name else [] for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) if len(modules) > 1 else names[0]


def whatever_is_wrong(case: Case) -> dict[int, Finding]:
    """The first row that is wrong, for where nobody is found to blame: that nothing is wrong must not be said then."""
    structure = case.structure
    wrong = [row for row, status in enumerate(case.judgement.status) if status in WRONG_STATUSES]
    if not wrong:
        return {}
    first = min(wrong, key=lambda row: (structure.scope[row][1], structure.seq[row]))
    return {first: case.finding(first, place_of(first, structure, case.judgement), first)}


def findings(case: Case) -> dict[int, Finding]:
    """All births by their row, the earliest first."""
    structure = case.structure
    found = {}
    culprits: dict[tuple[int, int, int], list[str]] = {}
    for born in case.births()[:_MOST]:
        at_root = structure.at_root(born) if structure.kind[born] == "grad_output" else None
        row = born if at_root is None else at_root
        place = place_of(row, structure, case.judgement)
        if (maker := case.maker(row)) is not None:
            place = Place(maker, True)
        if structure.kind[row] == "grad_output":
            # What a module sends back to the code around it is recorded only further on: that code is not to blame.
            module = case.blamed(row, place)
            known = culprits.setdefault(structure.scope[row], [])
            if any(culprit != module and _within(culprit, module) for culprit in known):
                continue
            known.append(module)
        found[row] = case.finding(row, place, born)
    return found

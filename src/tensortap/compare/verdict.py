"""From judgements to findings: where a wrong value was born, and which module to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tensortap.compare.judge import Judgement
from tensortap.compare.structure import Call, Structure
from tensortap.records import Difference, Finding, Key

__all__ = ["Place", "findings", "place_of"]

_MOST = 1000


@dataclass(frozen=True)
class Place:
    """Whose doing a wrong row is: another module than the record's own, or None for its own."""

    container: str | None
    inputs_matched: bool | None


def place_of(row: int, structure: Structure, judgement: Judgement) -> Place:
    """Lay a wrong value to the module whose own code made it."""
    kind = structure.kind[row]
    call = structure.call_of(row)
    known = bool(structure.sources(row))
    if kind == "input":
        around = call.parent if call is not None else None
        return Place(None if around is None else around.module, None if around is None else True)
    if kind == "grad_output" and structure.at_root(row) is not None:
        return Place(None, None)
    if kind == "grad_output" and call is not None:
        return Place(_sender(row, call, structure, judgement), True if known else None)
    return Place(None, True if known else None)


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
    return _common([user.module for user in users], [user.parent for user in users])


def _own_gradients(call: Call, structure: Structure) -> list[int]:
    rank, step, micro = call.scope
    parameters = [
        row
        for (r, s, module, _), rows in structure.gradients_of.items()
        if (r, s, module) == (rank, step, call.module)
        for row in rows
        if structure.scope[row][2] == micro
    ]
    return parameters + call.of("grad_input")


def _is_wrong(row: int, judgement: Judgement) -> bool:
    return judgement.status[row] in ("diverged", "nonfinite", "shape")


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


def findings(
    judgement: Judgement,
    structure: Structure,
    key: Callable[[int], Key],
    cls: Callable[[int], str],
    difference: Callable[[int], Difference | None],
    theirs: Mapping[str, str],
) -> dict[int, Finding]:
    """All births by their row, the earliest first. `theirs` has the candidate's names of modules, where they differ."""
    rows = sorted(judgement.born, key=lambda row: (structure.scope[row][1], structure.seq[row]))
    found = {}
    culprits: dict[tuple[int, int, int], list[str]] = {}
    for born in rows[:_MOST]:
        at_root = structure.at_root(born) if structure.kind[born] == "grad_output" else None
        row = born if at_root is None else at_root
        place = place_of(row, structure, judgement)
        module = structure.module[row] if place.container is None else place.container
        if structure.kind[row] == "grad_output":
            # What a module sends back to the code around it is recorded only further on: that code is not to blame.
            known = culprits.setdefault(structure.scope[row], [])
            if any(culprit != module and _within(culprit, module) for culprit in known):
                continue
            known.append(module)
        found[row] = Finding(
            key=key(row),
            rank=structure.scope[row][0],
            cls=cls(row),
            status=judgement.status[row],
            difference=difference(row),
            tolerance=float(judgement.tolerance[row]),
            row_tolerance=float(judgement.row_tolerance[row]),
            rule=judgement.rule[row],
            inputs_matched=place.inputs_matched,
            container=place.container if place.container != structure.module[row] else None,
            inputs_rel_l2=judgement.sources_error[born],
            counterpart=theirs.get(module),
        )
    return found

"""Values that code puts into a collection, as layers do that share keys: later modules of the same list take them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure
from tensortap.core.records import Key

__all__ = ["gradients_of_elements", "lacks_shared_gradient"]


def gradients_of_elements(lost: Collection[Key]) -> list[Key]:
    """Return those of the gradients that only the reference has which a module sends to an element of a collection."""
    return [key for key in lost if key.kind == "grad_input" and "." in key.path]


def lacks_shared_gradient(call: CallRows, elements: Sequence[Key], structure: Structure) -> bool:
    """Whether a call, or one around it, may have put a value into a collection, and a later module of the same list is
    given it there and sends no gradient back for it.

    elements: `gradients_of_elements`.
    """
    around: CallRows | None = call if elements else None
    while around is not None:
        given = {structure.path[row] for row in around.of("input")}
        beside = around.module.rpartition(".")[0]
        for key in elements:
            if key.path in given or key.module.rpartition(".")[0] != beside:
                continue
            users = structure.calls_of_module.get((around.scope, key.module), ())
            place = (key.step, key.micro) == around.scope[1:]
            if place and any(user.number == key.call and user.begin > around.end for user in users):
                return True
        around = around.parent
    return False

"""Backwards that are differentiated again, as for forces or a gradient penalty, in an isolated check.

Their own graph holds values of the forward pass. What the second backward sends to these arrives beside the tensors
that a check replaces, so that the gradient of one value is split in another way than in the run that was captured.
"""

from __future__ import annotations

from collections.abc import Collection

from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.structure import Structure
from tensortap.core.records import GRADIENT_KINDS

__all__ = ["DIFFERENTIATED", "rows_of_differentiated"]

DIFFERENTIATED = "a backward was differentiated, and a check splits its gradients in another way"
_APART = 1e-3
"""Relative error of a gradient between modules from which on it is split in another way."""
_ROUNDING = 1e-5


def rows_of_differentiated(pairs: Pairs, structure: Structure, at: Collection[tuple[int, int]]) -> set[int]:
    """Return the gradients inside a model in micro steps with such a backward, if some that modules send are apart."""
    if not at:
        return set()
    inside: dict[tuple[int, int, int], set[int]] = {}
    apart: set[tuple[int, int, int]] = set()
    for row, scope in enumerate(structure.scope):
        if scope[1:] in at and structure.kind[row] in GRADIENT_KINDS and _is_inside(row, structure):
            inside.setdefault(scope, set()).add(row)
            if structure.kind[row] != "param_grad" and pairs.error[row] > _APART:
                apart.add(scope)
    found = set().union(*(inside[scope] for scope in apart))
    got = [each for row in found if structure.kind[row] == "param_grad" for each in _got(row, structure)]
    return found.union(each for each in got if pairs.error[each] > _ROUNDING)


def _got(row: int, structure: Structure) -> list[int]:
    """Return what the optimizer gets of a parameter's gradient."""
    at, path = structure.scope[row][:2], structure.path[row].partition("~")[0]
    return structure.step_gradients_of.get((*at, structure.module[row], path), [])


def _is_inside(row: int, structure: Structure) -> bool:
    """Whether a gradient is none that comes from outside the model."""
    call = structure.call_of(row)
    return structure.kind[row] != "grad_output" or call is None or call.parent is not None

"""Modules that draw random numbers, after the stream of random numbers went out of step.

All of them draw from one stream. Once something has drawn more or fewer numbers than in the reference, every later
module draws others: it is not at fault. It draws with the same probability, which the counts of zeros show.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tensortap.compare.judge.structure import Structure

__all__ = ["draws", "without_out_of_step"]

_DRAWS = re.compile(r"drop|stochastic", re.IGNORECASE)
_SIGMAS = 5.0


def draws(cls: str) -> bool:
    """Whether a module of this class draws random numbers, by its name."""
    return _DRAWS.search(cls) is not None


def without_out_of_step(
    births: Sequence[int],
    structure: Structure,
    class_of: Callable[[int], str],
    zeros_of: Callable[[int], tuple[int, int]],
) -> list[int]:
    """Return the births without those of modules that only draw other random numbers, after an earlier birth.

    births: in execution order.
    class_of: the class of a row's module.
    zeros_of: the number of zeros of a row, in the reference and in the candidate.
    """
    kept: list[int] = []
    for row in births:
        random = structure.kind[row] in ("output", "grad_input") and draws(class_of(row))
        if random and _is_after(row, kept, structure) and _are_alike(*zeros_of(row)):
            continue
        kept.append(row)
    return kept


def _is_after(row: int, births: Sequence[int], structure: Structure) -> bool:
    rank, module = structure.scope[row][0], structure.module[row]
    return any(structure.scope[born][0] == rank and structure.module[born] != module for born in births)


def _are_alike(ours: int, theirs: int) -> bool:
    """Whether two counts of zeros may come from the same probability. A module that drops nothing has none."""
    return ours > 0 and theirs > 0 and abs(ours - theirs) <= _SIGMAS * (ours + theirs) ** 0.5

"""Choices of experts that no record holds: code of a container takes the tokens of each expert, and hands them to it.

What each expert is given shows the choices. Its rows are those of a tensor with all tokens, so that whole tensors show
who chose it, and summaries how many did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare.measure.choices import ChangedChoice, changed_choice

__all__ = ["compare_routed", "estimate_routed"]

Array = npt.NDArray[Any]
Lengths = Mapping[int, int]
"""By number of an expert: how many tokens it is given."""
Sides = tuple[Callable[[int], Array], Callable[[int], Array]]
"""Functions that return the tensor of a pair, of the reference and of the candidate."""


def estimate_routed(
    lengths: tuple[Lengths, Lengths], scores: tuple[int, ...], moved: float | None
) -> ChangedChoice | None:
    """Estimate from numbers of tokens how many choices changed; None if the sides do not make as many choices.

    scores: the shape of the scores. moved: by how much they differ.
    """
    ours, theirs = lengths
    tokens, experts = int(np.prod(scores[:-1])), scores[-1]
    made, rest = divmod(sum(ours.values()), tokens) if tokens else (0, 0)
    if rest or not 0 < made < experts or sum(theirs.values()) != made * tokens:
        return None
    left = sum(max(0, ours.get(each, 0) - theirs.get(each, 0)) for each in ours)
    return ChangedChoice(tokens, min(tokens, max(1, left)), None, None, experts, moved=moved)


def compare_routed(
    experts: Mapping[int, int], tokens: int, scores: int, given: Sequence[int], sides: Sides
) -> ChangedChoice | None:
    """Compare choices by the tokens that each expert is given; None if these are not known.

    experts: by number of an expert, the pair of its input. tokens: the number of all. scores: the pair of these.
    given: pairs that may hold all tokens.
    """
    rated = tuple(side(scores).reshape(tokens, -1) for side in sides)
    chosen = []
    for side, ratings in zip(sides, rated, strict=True):
        parts = {number: side(pair) for number, pair in experts.items()}
        found = next((found for pair in given if (found := _chosen(side(pair), parts, ratings)) is not None), None)
        if found is None:
            return None
        chosen.append(found)
    if chosen[0].shape != chosen[1].shape:
        return None
    return changed_choice((chosen[0], chosen[1]), (rated[0], rated[1]))


def _chosen(given: Array, parts: Mapping[int, Array], scores: Array) -> Array | None:
    """Return the experts that each token chose, the one with the best score first; None if the parts do not show it."""
    width = given.shape[-1]
    rows = np.ascontiguousarray(given.reshape(-1, width))
    if len(rows) != len(scores) or any(part.shape[-1] != width or part.dtype != given.dtype for part in parts.values()):
        return None
    places: dict[bytes, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.tobytes(), []).append(place)
    chosen: list[list[int]] = [[] for _ in rows]
    for number, part in parts.items():
        seen: dict[bytes, int] = {}
        for row in np.ascontiguousarray(part.reshape(-1, width)):
            name = row.tobytes()
            which = seen[name] = seen.get(name, -1) + 1  # equal tokens choose alike
            if which >= len(places.get(name, ())):
                return None
            chosen[places[name][which]].append(number)
    if not chosen or not chosen[0] or len({len(each) for each in chosen}) > 1:
        return None
    found = np.array(chosen, np.int64)
    order = np.argsort(-np.take_along_axis(scores.astype(np.float64), found, 1), axis=1, kind="stable")
    return np.take_along_axis(found, order, 1)

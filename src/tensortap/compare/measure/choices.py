"""Choices that rounding decides: a router takes the experts with the best scores, and two scores may be tied.

Where the choices of few tokens differ and their scores differ by less than rounding, no code is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.measure.hidden import HiddenPositions
from tensortap.kernels import difference

__all__ = [
    "ChangedChoice",
    "ChoiceReader",
    "ChoiceSource",
    "better_explained",
    "changed_choice",
    "changed_codes",
    "error_without_tokens",
    "holds_scores",
]

Array = npt.NDArray[Any]
_LEAST_EXPERTS = 2
_FOLLOWING = 0.9
"""Share of tokens that choose experts with good scores if choices are made by these at all."""
_SATURATED = 16.0
"""A score from which on a sigmoid is 1 in float32."""


@dataclass(frozen=True)
class ChangedChoice:
    """How the choices of a router differ."""

    tokens: int
    changed: int
    """How many tokens chose another expert; an estimate if they are not known."""
    tied: bool | None
    """Whether the scores of all changed choices differ by less than rounding; None if that is not known."""
    which: tuple[int, ...] | None = None
    """The changed tokens; None if they are not known."""
    experts: int = 0
    reordered: bool = False
    """Whether all of them chose the same experts in another order."""
    moved: float | None = None
    """By how much the scores differ, if the choices follow them and nothing random."""
    of_codes: bool = False
    """Whether codes of a book were chosen, by distances that were not recorded."""


def changed_choice(choices: tuple[Array, Array], scores: tuple[Array, Array]) -> ChangedChoice | None:
    """Compare choices by the scores that they were made from; None if these are not choices by scores.

    The n-th best score moves by no more than the scores do. So two choices of rounding differ by twice that at most.
    """
    if choices[0].ndim == 1:
        return _changed_order(choices, scores)
    return _compared(choices, scores)


def changed_codes(ours: Array, theirs: Array) -> ChangedChoice:
    """Compare the numbers of codes that tokens took, one each."""
    which = tuple(np.flatnonzero(ours.reshape(-1) != theirs.reshape(-1)).tolist())
    codes = int(max(ours.max(), theirs.max())) + 1
    return ChangedChoice(ours.size, len(which), None, which, codes, of_codes=True)


def _compared(
    choices: tuple[Array, Array], scores: tuple[Array, Array], unknown: Array | bool = False
) -> ChangedChoice | None:
    """Compare choices of a few experts for each token. `unknown`: tokens whose choice is one of several."""
    experts = scores[0].shape[-1]
    ours, theirs = (array.reshape(-1, array.shape[-1]).astype(np.int64) for array in choices)
    if min(ours.min(), theirs.min()) < 0 or max(ours.max(), theirs.max()) >= experts:
        return None
    left, right = (array.reshape(-1, experts).astype(np.float64) for array in scores)
    if bool(((left == left.min()) | (left == left.max())).all()):
        return None  # a mask: with two values, nearly all would be tied
    changed = (ours != theirs).any(axis=1) | unknown
    moved = np.abs(left - right).max(axis=1, keepdims=True)
    apart = np.abs(np.take_along_axis(left, ours, 1) - np.take_along_axis(left, theirs, 1)) - 2 * moved
    certain, possible = _tie_widths(left, _epsilon(scores))
    tied: bool | None = bool((apart <= certain)[changed].all())
    if not tied and ((apart <= possible)[changed].all() or not _is_best(ours, left)):
        tied = None  # a function of these scores that saturates, or something else decides as well, such as a bias
    which = tuple(np.flatnonzero(changed).tolist())
    reordered = np.array_equal(np.sort(ours, axis=1), np.sort(theirs, axis=1)) and not np.any(unknown)
    moved_by = _movement(ours, (left, right))
    return ChangedChoice(len(ours), len(which), tied, which, experts, reordered, moved_by)


def _epsilon(scores: tuple[Array, Array]) -> float:
    return max(float(ml_dtypes.finfo(array.dtype).eps) for array in scores if array.dtype.kind not in "biu")


def _tie_widths(scores: Array, epsilon: float) -> tuple[Array, Array]:
    """Return by how much tied scores of each token may differ for certain, and at most.

    Scores with a sign are made positive by a softmax or a sigmoid before the choice. Where that rounds to a dtype, it
    moves a score x by an epsilon under a softmax, and by up to (1 + exp(x)) of them under a sigmoid, which saturates.
    """
    relative = epsilon * np.abs(scores).max(axis=1, keepdims=True)
    if not (scores < 0).any():
        return relative, relative
    best = np.minimum(scores.max(axis=1, keepdims=True), _SATURATED)
    return np.maximum(relative, 2 * epsilon), np.maximum(relative, epsilon * (1 + np.exp(best)))


def better_explained(one: ChangedChoice | None, other: ChangedChoice | None) -> ChangedChoice | None:
    """Return which of two comparisons of the same choices, by other scores, tells more: that they are tied; or if none
    does, that they follow these scores."""
    if one is None or other is None:
        return one or other
    if one.tied or other.tied:
        return one if one.tied and not other.tied else other
    return one if one.moved is not None or other.moved is None else other


def _changed_order(orders: tuple[Array, Array], scores: tuple[Array, Array]) -> ChangedChoice | None:
    """Compare two lists of tokens sorted by their experts, by the scores; None if these are no such lists.

    A list has every token once for each expert that it chose, or the numbers of these choices, token by token.
    """
    experts = scores[0].shape[-1]
    left, right = (array.reshape(-1, experts).astype(np.float64) for array in scores)
    each, rest = divmod(orders[0].size, len(left))
    if rest or not 0 < each <= experts:
        return None
    choices = tuple(np.argsort(-array, axis=1, kind="stable")[:, :each] for array in (left, right))
    equal = tuple(_are_equal_at(array, each) for array in (left, right))
    if not all(map(_is_sorted_by, orders, choices, equal)):
        return None
    return _compared((choices[0], choices[1]), scores, unknown=equal[0] | equal[1])


def _are_equal_at(scores: Array, each: int) -> Array:
    """Return the tokens whose last chosen score is equal to the next one: either may be chosen."""
    ordered = -np.sort(-scores, axis=1)
    if each == scores.shape[1]:
        return np.zeros(len(scores), bool)
    return np.asarray(ordered[:, each - 1] == ordered[:, each])


def _is_sorted_by(order: Array, choices: Array, equal: Array) -> bool:
    """Whether a list holds first the tokens that chose the first expert, then those of the second, ...

    equal: tokens with equal scores, which may be anywhere.
    """
    tokens, each = choices.shape
    order = order.astype(np.int64)
    if order.min() < 0 or order.max() >= tokens * each:
        return False
    if each > 1 and np.array_equal(np.sort(order), np.arange(tokens * each)):
        order = order // each
    order = order[~equal[order]] if order.max() < tokens else order
    choices = np.where(equal[:, None], -1, choices).reshape(-1)
    expected = (np.argsort(choices, kind="stable") // each)[np.count_nonzero(choices < 0) :]
    ends = np.cumsum(np.bincount(choices[choices >= 0]))[:-1]
    parts = zip(np.split(order, ends), np.split(expected, ends), strict=True)
    return all(np.array_equal(np.sort(ours), np.sort(theirs)) for ours, theirs in parts)


def _is_best(choices: Array, scores: Array) -> bool:
    """Whether all choices are those with the best scores."""
    best = -np.sort(-scores, axis=1)[:, : choices.shape[1]]
    return bool(np.array_equal(np.sort(np.take_along_axis(scores, choices, 1)), np.sort(best)))


def _movement(choices: Array, scores: tuple[Array, Array]) -> float | None:
    """Return by how much scores differ; None if choices do not follow them.

    Most tokens choose experts with better scores than the mean, whatever else decides.
    """
    chosen = np.take_along_axis(scores[0], choices, 1).mean(axis=1)
    if np.count_nonzero(chosen > scores[0].mean(axis=1)) < _FOLLOWING * len(choices):
        return None
    size = float(np.linalg.norm(scores[0]))
    return float(np.linalg.norm(scores[0] - scores[1])) / size if size else None


def holds_scores(shape: tuple[int, ...], choices: tuple[int, ...]) -> bool:
    """Whether a tensor may hold the scores of all experts that choices, or an order of tokens, were made from."""
    if len(choices) == 1:
        tokens = int(np.prod(shape[:-1]))
        return len(shape) >= 2 and shape[-1] >= _LEAST_EXPERTS and tokens > 1 and choices[0] % tokens == 0
    fits = len(shape) >= 2 and shape[-1] >= max(_LEAST_EXPERTS, choices[-1])
    return fits and bool(np.prod(shape[:-1]) == np.prod(choices[:-1]))


def error_without_tokens(
    choice: ChangedChoice, shape: tuple[int, ...], arrays: Callable[[], tuple[Array, Array]]
) -> float | None:
    """Return the relative error of a pair without the tokens whose choice changed; None if it is not known."""
    leading = next((n for n in range(1, len(shape)) if np.prod(shape[:n]) == choice.tokens), 0)
    moved: list[Callable[[Array], Array]] = [np.asarray] if leading else []
    if len(shape) == 4 and shape[0] * shape[2] == choice.tokens:
        moved.append(lambda array: np.swapaxes(array, 1, 2))  # as the weights of an attention
    if len(shape) > 2 and shape[0] * np.prod(shape[2:]) == choice.tokens:
        moved.append(lambda array: np.moveaxis(array, 1, -1))  # channels first, as of an image
    if not moved or choice.which is None or len(choice.which) == choice.tokens:
        return None
    given = arrays()
    found = [_error_without(choice, *map(move, given)) for move in moved]
    return min((error for error in found if error is not None), default=None)


def _error_without(choice: ChangedChoice, ours: Array, theirs: Array) -> float | None:
    flat = (array.reshape(choice.tokens, -1).astype(np.float64) for array in (ours, theirs))
    ours, theirs = (np.delete(array, list(choice.which or ()), axis=0) for array in flat)
    size = float(np.linalg.norm(ours))
    return difference(ours, theirs).difference.l2 / size if size else None


def _changed_by(apart: float, experts: int, tokens: int) -> int | None:
    """Return about how many choices changed, from the norm of their difference: the distance of two random experts is
    known."""
    return min(tokens, max(1, round(apart**2 / (experts * (experts + 1) / 6)))) if np.isfinite(apart) else None


class ChoiceSource(Protocol):
    """Access of `Ties` to the choices of pairs."""

    def may_be_choice(self, pair: int) -> bool: ...

    def knows_tokens(self, pair: int) -> bool: ...

    def compare(self, pair: int, scores: Sequence[int]) -> ChangedChoice | None: ...

    def may_be_code(self, pair: int) -> bool: ...

    def compare_codes(self, pair: int) -> ChangedChoice | None: ...

    def compare_routed(self, experts: Mapping[int, int], scores: int, given: Sequence[int]) -> ChangedChoice | None: ...

    def error_without(self, pair: int, choice: ChangedChoice) -> float | None: ...


class ChoiceReader:
    """Looks at the choices of pairs, and at other pairs without the tokens whose choice changed."""

    def __init__(
        self,
        reference: Side,
        candidate: Side,
        alignment: Alignment,
        distance: Array,
        hidden: Callable[[int], HiddenPositions | None] = lambda pair: None,
        draws: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        hidden: returns the positions that a mask hides in the forward pass of a pair; choices there do not count.
        draws: whether the model draws random numbers. Then scores alone may not explain a choice.
        """
        self._hidden, self._draws = hidden, draws
        self._reference, self._candidate = reference, candidate
        self._left, self._right = alignment.reference, alignment.candidate
        self._distance = distance
        names = reference.dtype.words
        self._integers = {code for code, name in enumerate(names) if name.startswith(("int", "uint"))}

    def may_be_choice(self, pair: int) -> bool:
        """Whether a pair consists of integers, a few for each token, or of a list of tokens."""
        if int(self._reference.dtype.codes[self._left[pair]]) not in self._integers:
            return False
        shape = self._shape(pair)
        return len(shape) >= 1 and min(shape) > 0 and shape == self._other_shape(pair)

    def knows_tokens(self, pair: int) -> bool:
        """Whether it is known which tokens changed their choice."""
        return self._kept(pair)

    def compare(self, pair: int, scores: Sequence[int]) -> ChangedChoice | None:
        """Return how choices differ. `scores` are pairs that they may have been made from."""
        shape = self._shape(pair)
        found: ChangedChoice | None = None
        for other in scores:
            given = self._shape(other)
            fits = given == self._other_shape(other) and holds_scores(given, shape)
            if not fits or self.may_be_choice(other):
                continue
            if self._kept(pair) and self._kept(other):
                choice = changed_choice(self._arrays(pair), self._arrays(other))
            else:
                choice = self._estimate(pair, given)
            found = better_explained(found, choice)
        if found is not None and found.tied is False and self._draws():
            return replace(found, tied=None, moved=None)
        return found

    def may_be_code(self, pair: int) -> bool:
        """Whether each number of a pair may be that of a code: there are several, and fewer than numbers."""
        return 1 < self._largest(pair) < int(np.prod(self._shape(pair)))

    def compare_codes(self, pair: int) -> ChangedChoice | None:
        """Return how numbers of codes differ, one for each token; None if these are none."""
        if not self.may_be_code(pair):
            return None
        if self._kept(pair):
            return changed_codes(*self._arrays(pair))
        tokens, codes = int(np.prod(self._shape(pair))), self._largest(pair) + 1
        changed = _changed_by(float(self._distance[pair]), codes, tokens)
        return None if changed is None else ChangedChoice(tokens, changed, None, None, codes, of_codes=True)

    def compare_routed(self, experts: Mapping[int, int], scores: int, given: Sequence[int]) -> ChangedChoice | None:
        """Return how choices differ that show in what experts are given.

        experts: by number of an expert, the pair of its input. scores: the pair of the scores. given: pairs that may
        hold all tokens.
        """
        from tensortap.compare.measure.routed import compare_routed, estimate_routed

        shape = self._shape(scores)
        if shape != self._other_shape(scores) or len(shape) < 2 or max(experts) >= shape[-1]:
            return None
        ours, theirs = (
            {each: of(pair)[0] for each, pair in experts.items()} for of in (self._shape, self._other_shape)
        )
        size, moved = float(self._reference.l2[self._left[scores]]), float(self._distance[scores])
        found = estimate_routed((ours, theirs), shape, moved / size if size else None)
        if found is None or not all(map(self._kept, (*experts.values(), scores, *given))):
            return found
        sides = (
            lambda pair: self._reference.array(int(self._left[pair])),
            lambda pair: self._candidate.array(int(self._right[pair])),
        )
        return compare_routed(experts, found.tokens, scores, given, sides) or found

    def error_without(self, pair: int, choice: ChangedChoice) -> float | None:
        """Return the relative error of a pair without the tokens whose choice changed; None if it is not known."""
        shape = self._shape(pair)
        if not self._kept(pair) or shape != self._other_shape(pair):
            return None
        return error_without_tokens(choice, shape, lambda: self._arrays(pair))

    def _estimate(self, pair: int, scores: tuple[int, ...]) -> ChangedChoice | None:
        """Estimate from summaries how many choices changed: between two random experts is a known distance. Of a list
        of tokens, only that it has the same ones.

        Scores may be wider than there are experts, if they are no scores after all: no choice exceeds the largest.
        """
        apart, experts = float(self._distance[pair]), min(scores[-1], self._largest(pair) + 1)
        if len(self._shape(pair)) == 1:
            ours, theirs = float(self._reference.l2[self._left[pair]]), float(self._candidate.l2[self._right[pair]])
            return ChangedChoice(int(np.prod(scores[:-1])), 1, None, None, scores[-1]) if ours == theirs else None
        tokens = int(np.prod(self._shape(pair)[:-1]))
        changed = _changed_by(apart, experts, tokens)
        return None if changed is None else ChangedChoice(tokens, changed, None, None, experts)

    def _largest(self, pair: int) -> int:
        sides = (self._reference, int(self._left[pair])), (self._candidate, int(self._right[pair]))
        return max(1, *(int(side.max[row]) for side, row in sides))

    def _shape(self, pair: int) -> tuple[int, ...]:
        return self._reference.shape(int(self._left[pair]))

    def _other_shape(self, pair: int) -> tuple[int, ...]:
        return self._candidate.shape(int(self._right[pair]))

    def _kept(self, pair: int) -> bool:
        return bool(self._reference.kept[self._left[pair]] and self._candidate.kept[self._right[pair]])

    def _arrays(self, pair: int) -> tuple[Array, Array]:
        ours, theirs = self._reference.array(int(self._left[pair])), self._candidate.array(int(self._right[pair]))
        hidden = self._hidden(pair)
        return ours, hidden.overlay(ours, theirs) if hidden else theirs

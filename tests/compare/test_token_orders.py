"""Lists of tokens, sorted by the experts that these chose, are compared by the scores that decided."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from made_runs import values

from tensortap.compare.measure.choices import ChangedChoice, changed_choice, error_without_tokens
from tensortap.compare.measure.hidden import HiddenPositions

Array = npt.NDArray[Any]
TOKENS, EXPERTS, EACH = 16, 4, 2


def order_of(scores: Array, by_token: bool) -> Array:
    """Sort choices by expert: the numbers of the choices, or of their tokens."""
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :EACH]
    order = np.argsort(chosen.reshape(-1), kind="stable")
    return order // EACH if by_token else order


@pytest.fixture
def scores() -> Array:
    return values(3, (TOKENS, EXPERTS)).astype(np.float64)


@pytest.mark.parametrize("by_token", [False, True])
def test_an_order_that_tied_scores_explain(scores: Array, by_token: bool) -> None:
    best = np.argsort(-scores[5])
    scores[5, best[2]] = scores[5, best[1]] * (1 - 1e-7)
    moved = scores.copy()
    moved[5, best[2]] = scores[5, best[1]] * (1 + 1e-7)
    orders = order_of(scores, by_token), order_of(moved, by_token)
    found = changed_choice(orders, (scores, moved))
    assert found is not None and found.tied and found.which == (5,) and found.tokens == TOKENS


@pytest.mark.parametrize("by_token", [False, True])
def test_an_order_within_an_expert_does_not_matter(scores: Array, by_token: bool) -> None:
    order = order_of(scores, by_token)
    other = order.copy()
    other[:2] = other[1::-1]  # two tokens of the first expert
    found = changed_choice((order, other), (scores, scores))
    assert found is not None and found.tied and not found.changed


@pytest.mark.parametrize("by_token", [False, True])
def test_an_order_by_other_experts_is_no_choice_by_scores(scores: Array, by_token: bool) -> None:
    order = order_of(scores, by_token)
    assert changed_choice((order, order[::-1].copy()), (scores, scores)) is None
    assert changed_choice((order, order + 1), (scores, scores)) is None
    assert changed_choice((order[:-1], order[:-1]), (scores, scores)) is None


def test_hidden_positions_are_taken_from_the_reference() -> None:
    hidden = HiddenPositions()
    hidden.add(np.array([[True, False], [False, False]]))
    ours, theirs = np.arange(8).reshape(4, 2), np.arange(8).reshape(4, 2) + 10
    assert hidden.overlay(ours, theirs).tolist() == [[0, 1], [12, 13], [14, 15], [16, 17]]
    assert hidden.overlay(np.arange(3), np.arange(3) + 1).tolist() == [1, 2, 3]  # no axes of positions


@pytest.mark.parametrize("by_token", [False, True])
def test_equal_scores_may_be_ordered_either_way(scores: Array, by_token: bool) -> None:
    best = np.argsort(-scores[5])
    scores[5, best[2]] = scores[5, best[1]]  # as bfloat16 rounds them
    other = scores.copy()
    other[5, best[[1, 2]]] += [-1e-9, 1e-9]  # decides as another kernel may
    found = changed_choice((order_of(scores, by_token), order_of(other, by_token)), (scores, scores))
    assert found is not None and found.tied and found.which == (5,) and not found.reordered


@pytest.mark.parametrize(("apart", "tied"), [(0.01, True), (0.1, None), (1.0, False)])
def test_a_short_sigmoid_ties_scores_that_differ(scores: Array, apart: float, tied: bool | None) -> None:
    """bfloat16 holds no two sigmoids whose scores are less than two epsilons apart; of a large score, none at all."""
    short = values(3, (TOKENS, EXPERTS)).astype(ml_dtypes.bfloat16)
    short[5] = [4.0, 3.5, 3.5 - apart, 0.0]
    chosen = np.argsort(-short.astype(np.float32), axis=1, kind="stable")[:, :EACH]
    other = chosen.copy()
    other[5] = [0, 2]
    found = changed_choice((chosen, other), (short, short))
    assert found is not None and found.tied is tied


def test_weights_of_an_attention_are_compared_without_changed_tokens() -> None:
    choice = ChangedChoice(tokens=6, changed=1, tied=True, which=(4,), experts=2)
    ours = values(4, (2, 5, 3, 3))
    theirs = ours.copy()
    theirs[1, :, 1] += 1  # token 4 is the second one of the second text
    assert error_without_tokens(choice, ours.shape, lambda: (ours, theirs)) == 0.0
    theirs[0, 0, 0, 0] += 1
    assert error_without_tokens(choice, ours.shape, lambda: (ours, theirs)) != 0.0


def test_a_mask_holds_no_scores() -> None:
    """Nearly all of its elements are equal, which would tie any choice."""
    numbers = np.array([[0], [1], [2], [1]]), np.array([[1], [2], [0], [2]])
    mask = np.zeros((4, 8), np.float32)
    mask[1, :3] = 1
    assert changed_choice(numbers, (mask, mask)) is None
    certain = np.eye(8, dtype=np.float32)[numbers[0][:, 0]] + 0.1 * values(1, (4, 8))
    found = changed_choice(numbers, (certain, certain))
    assert found is not None and found.tied is False

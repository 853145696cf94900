"""Plain tensors that attention makes of a divided projection."""

from __future__ import annotations

import pytest

from tensortap.core.placement import Placement
from tensortap.frameworks.torch.placements.heads import part_by_heads

FEATURES = Placement((4, 8, 32), (((0, 0, 4), (0, 0, 8), (0, 16, 16)),), {"tp": "shard"})
"""The second half of a projection of 8 heads of 4, for 4 samples of 8 tokens."""


@pytest.mark.parametrize(
    ("shape", "along", "heads"),
    [
        ((4, 2, 8, 8), 1, 2),  # weights of attention; two heads of 8
        ((4, 4, 8, 4), 1, 4),  # queries by heads: the first of two factors is divided
        ((4, 8, 2, 8), 2, 2),  # tokens before heads
        ((4, 1, 8, 8), 1, 1),
    ],
)
def test_the_dimension_of_heads_is_divided(shape: tuple[int, ...], along: int, heads: int) -> None:
    found = part_by_heads(FEATURES, shape)
    assert found is not None and found.guessed and found.axes == {"tp": "shard"}
    assert found.shape == tuple(2 * size if at == along else size for at, size in enumerate(shape))
    assert found.boxes[0][along] == (0, heads, heads)


@pytest.mark.parametrize(
    "shape",
    [
        (4, 8, 16),  # no dimension more
        (4, 8, 8, 8),  # heads, if any, are as many as tokens
        (4, 3, 8, 8),  # not a factor of the features
        (4, 2, 8, 4),  # two factors that do not make up the features
        (5, 2, 8, 3),  # another batch
    ],
)
def test_an_unclear_shape_is_not_guessed(shape: tuple[int, ...]) -> None:
    assert part_by_heads(FEATURES, shape) is None


def test_a_sequence_that_is_divided_is_not_taken_for_heads() -> None:
    tokens = Placement((4, 8, 32), (((0, 0, 4), (0, 4, 4), (0, 0, 32)),), {"tp": "shard"})
    assert part_by_heads(tokens, (4, 2, 4, 4)) is None


def test_an_uneven_share_of_heads_has_its_own_offset() -> None:
    rest = Placement((4, 8, 12), (((0, 0, 4), (0, 0, 8), (0, 8, 4)),), {"tp": "shard"})
    found = part_by_heads(rest, (4, 1, 8, 8))
    assert found is not None
    assert (found.shape, found.boxes[0][1]) == ((4, 3, 8, 8), (0, 2, 1))

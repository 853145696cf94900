"""Where records begin to disagree is found from their largest and smallest elements."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.compare.judge.extremes import _agrees, _begin_of_mistake


def flags(text: str) -> np.ndarray:
    return np.array([each == "+" for each in text], bool)


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("++++++++-----", 8),
        ("+++++-++++++++-----", 14),  # a largest element at a hidden position
        ("++++++++--+-+---", 8),  # positions that the mistake does not reach
        ("++++++++++", 10),
        ("----------", 0),
        ("-++--+--++------+-++-------", None),
        ("+-+-+-+-+-+-", None),
        ("+++---", None),  # too few
    ],
)
def test_the_begin_of_a_mistake(text: str, begin: int | None) -> None:
    assert _begin_of_mistake(flags(text)) == begin


def test_one_extreme_suffices_unless_attention_made_it() -> None:
    ours, theirs = (-2.0, 3.0), (-2.0, 3.1)
    assert _agrees(1e-6, False, ours, theirs) and not _agrees(1e-6, True, ours, theirs)
    assert _agrees(1e-6, True, ours, (-2.000001, 3.000001))
    assert not _agrees(1e-6, False, ours, (-2.1, 3.1))

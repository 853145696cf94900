"""Where records begin to disagree is found from their largest and smallest elements."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.compare.judge.extremes import ShownElements, _agrees, _begin_of_mistake, _first_known


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


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("++P+N---", 4),
        ("++P--N+-", 3),  # those right before it seem to disagree, too
        ("+-+P-+P+", None),  # no sums show it
        ("N-------", 0),
    ],
)
def test_the_first_record_whose_sums_disagree(text: str, begin: int | None) -> None:
    """P and N: sums show that a record agrees, or that it does not."""
    known = np.array([each in "PN" for each in text], bool)
    assert _first_known(np.array([each in "+P" for each in text], bool), known) == begin


def test_sums_tell_more_than_extremes() -> None:
    def shown(share: float | None) -> ShownElements:
        return ShownElements(lambda row: ((-2.0, 3.0), (-2.0, 3.0)), lambda row, rounding: share, hidden=0.1)

    assert shown(1.0).agree(0, 1.4, 1e-6, True) == (True, True)
    assert shown(0.5).agree(0, 1e-5, 1e-6, False) == (False, True)
    assert shown(None).agree(0, 0.3, 1e-6, True) == (True, False)
    assert shown(None).agree(0, 1.4, 1e-6, True) == (False, False)  # more than hidden positions can make of it

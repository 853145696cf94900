"""Where a mistake begins is found from what summaries show of elements beside hidden positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensortap.compare.judge.extremes import begin_of_mistake
from tensortap.compare.judge.shown_elements import ShownElements, Sign
from tensortap.compare.measure.ranges import Range, SideNorm

SIGNS = {"+": Sign(-1.7), "~": Sign(0.75), "-": Sign(3.2), "P": Sign(-20.0, True), "N": Sign(20.0, True)}
"""Both extremes agree, one does, none does; sums show that a record agrees, or that it does not."""


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("++++++++-----", 8),
        ("+++++~++++++++-----", 14),  # a largest element at a hidden position
        ("++++++++--+-+---", 8),  # positions that the mistake does not reach
        ("++++++++++", 10),
        ("----------", 0),
        ("+++---", None),  # too few
        ("++P+N---", 4),
        ("++P--N+-", 3),  # those right before it seem to disagree, too
        ("+++P-+P+", 8),  # a later one certainly agrees
        ("N-------", 0),
    ],
)
def test_the_begin_of_a_mistake(text: str, begin: int | None) -> None:
    assert begin_of_mistake([SIGNS[each] for each in text], [0.0] * len(text)) == begin


def test_code_between_modules_is_likelier_to_be_wrong_than_a_layer() -> None:
    """After an attention whose extremes stay the same, the norm behind it seems to be the first that differs."""
    signs = [SIGNS[each] for each in "++++++++~+---"]
    assert begin_of_mistake(signs, [0.0] * 13) == 10
    assert begin_of_mistake(signs, [*[0.0] * 8, 3.0, *[0.0] * 4]) == 8


def shown(
    ours: Range = (-2.0, 3.0),
    theirs: Range = (-2.0, 3.0),
    sums: float | None = None,
    norms: tuple[SideNorm, SideNorm] = (SideNorm(1.0, 0.0), SideNorm(1.0, 0.0)),
    blind: float = 0.0,
) -> Callable[..., Sign]:
    found = ShownElements(
        lambda row: (ours, theirs),
        lambda row, rounding: sums,
        hidden=0.1,
        norms=lambda row: norms,
        blind=blind,
        bounds=frozenset({0.0}),
    )

    def sign(error: float = 0.3, made_by_attention: bool = False) -> Sign:
        return found.sign(0, error, 1e-6, made_by_attention)

    return sign


def test_sums_tell_more_than_extremes() -> None:
    agree, differ = shown(sums=1.0)(), shown(sums=0.5)()
    assert agree.certain and agree.weight < 0 and differ.certain and differ.weight > 0


def test_extremes_that_agree_speak_against_a_mistake() -> None:
    both, one, none = (shown(theirs=theirs)().weight for theirs in ((-2.0, 3.0), (-2.0, 3.1), (-2.1, 3.1)))
    assert both < 0 < one < none
    assert shown(theirs=(-2.000001, 3.000001))().weight == both
    assert shown()(made_by_attention=True).weight < 0
    assert shown()(1.4, True).weight > 0  # more than hidden positions can make of it


def test_the_least_value_of_an_activation_says_nothing() -> None:
    assert shown((0.0, 3.0), (0.0, 3.1))().weight == shown((-2.0, 3.0), (-2.0, 3.1))().weight + 0.85


def test_norms_show_how_much_differs_where_one_side_has_zeros() -> None:
    """If the candidate has zeros where it differs, and nothing else differs, the difference is a right angle to it."""
    ours, error = SideNorm(1.0, 0.0), 0.3
    right = shown(norms=(ours, SideNorm((1 - error**2) ** 0.5, 0.1)), blind=0.1)(error)
    wrong = shown(norms=(ours, SideNorm(1.0, 0.1)), blind=0.1)(error)
    unknown = shown(norms=(ours, SideNorm(1.0, 0.0)), blind=0.1)(error)
    assert right.weight < unknown.weight < 0 < wrong.weight


def test_an_extreme_of_the_side_with_zeros_is_not_hidden() -> None:
    norms = (SideNorm(1.0, 0.0), SideNorm((1 - 0.3**2) ** 0.5, 0.1))
    hidden, not_hidden = (shown(theirs=(-2.0, most), norms=norms, blind=0.1)().weight for most in (2.9, 3.1))
    assert hidden < 0 < not_hidden

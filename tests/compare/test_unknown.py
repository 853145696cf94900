"""Reports claim only known facts: overflowed and missing sketches, NaN in unknown places, unjudged inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from made_runs import Seen, rows, values, write

import tensortap as tt
from tensortap.core.records import Comparison
from tensortap.report.files import comparison_json
from tensortap.report.html import comparison as comparison_html
from tensortap.report.terminal import assertion

Array = npt.NDArray[Any]
BF16 = ml_dtypes.bfloat16
HIDDEN, MOVED = range(20, 50), range(21, 51)
"""Columns of huge numbers; enough for a sketch to overflow."""


def huge(dtype: Any, columns: Sequence[int]) -> Array:
    """Zeros and numbers so large that their sketch overflows, yet not at the edge of the range; no mask has a 1."""
    found = np.zeros((32, 64), dtype)
    found[:, list(columns)] = -1.5e38
    found[0, 0] = 1.0
    return found


def compared(tmp_path: Path, ours: Sequence[Seen], theirs: Sequence[Seen], **options: Any) -> Comparison:
    count = len(list(tmp_path.iterdir()))
    a, b = write(tmp_path / f"{count} a", ours), write(tmp_path / f"{count} b", theirs)
    return tt.compare(a, b, **options)


def attention(given: Array, keep: bool, off: float = 0.0) -> list[Seen]:
    """A module that is given numbers and a mask."""
    return [
        Seen("attn", values(1, (8, 16)), "input", keep=keep),
        Seen("attn", given, "input", path="mask", keep=keep),
        Seen("attn", values(2, (8, 16)) + np.float32(off), keep=keep),
    ]


# --- sketches -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_an_overflowed_sketch_proves_nothing(tmp_path: Path, dtype: Any) -> None:
    """As many hidden elements in other places: equal norms, and sketches that overflowed in other buckets."""
    result = compared(tmp_path, attention(huge(dtype, HIDDEN), False), attention(huge(dtype, MOVED), False, off=0.5))
    row = next(row for row in result.rows if row["path"] == "mask")
    assert row["status"] == "unjudged" and row["rel_l2_bar"] == np.inf
    assert result.verdict == "diverged"
    assert result.sentence.endswith("while its inputs match, except input mask, which could not be judged.")
    assert any("sketch overflowed" in note for note in result.notes)


def test_norms_still_tell_of_an_overflowed_sketch(tmp_path: Path) -> None:
    result = compared(
        tmp_path, attention(huge(np.float32, range(32)), False), attention(huge(np.float32, range(16)), False)
    )
    assert result.verdict == "diverged" and "input mask of attn (Linear) is off by at least 0.29" in result.sentence


def test_where_nan_are_is_not_known_of_a_summary(tmp_path: Path) -> None:
    ours, theirs = np.zeros((8, 16), np.float32), np.zeros((8, 16), np.float32)
    ours[2, 5] = theirs[2, 6] = np.nan
    result = compared(tmp_path, attention(ours, False), attention(theirs, False))
    row = next(row for row in result.rows if row["path"] == "mask")
    assert (row["status"], row["rule"]) == ("unjudged", "a summary does not show where its NaN and Inf are")
    assert result.sentence.startswith("Everything that could be judged matches: of 3 pairs, ")
    whole = compared(tmp_path, attention(ours, True), attention(theirs, True))
    assert whole.verdict == "diverged" and "has other NaN or Inf" in whole.sentence
    assert compared(tmp_path, attention(ours, False), attention(ours, False)).counts == {"equal": 3}


def test_infinities_among_other_numbers_than_zeros_show_in_a_sketch(tmp_path: Path) -> None:
    """Where masked scores differ by rounding only, they are judged as before."""
    ours = values(3, (8, 16))
    ours[:, 12:] = -np.inf
    theirs = ours * np.float32(1 + 2**-22)
    result = compared(tmp_path, [Seen("scores", ours, keep=False)], [Seen("scores", theirs, keep=False)])
    assert result.counts == {"close": 1}
    moved = np.roll(ours, 1, axis=1)
    assert compared(tmp_path, [Seen("s", ours, keep=False)], [Seen("s", moved, keep=False)]).verdict == "diverged"


# --- unjudged sources ---------------------------------------------------------------------------------------------
def test_runs_without_a_judged_pair_do_not_match(tmp_path: Path) -> None:
    seen = [Seen("attn", huge(np.float32, HIDDEN), "input", keep=False)]
    moved = [Seen("attn", huge(np.float32, MOVED), "input", keep=False)]
    result = compared(tmp_path, seen, moved)
    assert (result.verdict, result.counts) == ("incomparable", {"unjudged": 1})
    assert result.sentence == "Too little to judge: the one pair there is could not be judged."


def test_a_zero_reference_is_reported_as_such(tmp_path: Path) -> None:
    for keep in (True, False):
        ours, theirs = (
            [Seen("fc", values(1), "input", keep=keep), Seen("fc", array, keep=keep)]
            for array in (np.zeros((4, 6), np.float32), values(2))
        )
        result = compared(tmp_path, ours, theirs)
        assert "its output 0 is not zero where the reference's is, while its inputs match." in result.sentence


def parts(dtype: Any, hidden: Sequence[int], wrong: float = 0.0) -> list[Seen]:
    """A container that passes a mask to its only child, with a backward."""
    gradient = values(5, (8, 16))
    return [
        Seen("net", values(1, (8, 16)), "input", keep=False, tensor=1),
        Seen("net", huge(dtype, hidden), "input", path="mask", keep=False, tensor=2),
        Seen("net.attn", values(1, (8, 16)) + np.float32(wrong), "input", keep=False),
        Seen("net.attn", values(2, (8, 16)), keep=False, tensor=3),
        Seen("net", values(2, (8, 16)), keep=False, tensor=3),
        Seen("net", gradient, "grad_output", keep=False, tensor=4),
        Seen("net.attn", gradient, "grad_output", keep=False, tensor=4),
        Seen("net.attn", values(6, (16, 16)), "param_grad", path="weight", keep=False),
    ]


def test_code_between_modules_that_was_given_an_unjudged_value(tmp_path: Path) -> None:
    result = compared(tmp_path, parts(np.float32, HIDDEN), parts(np.float32, MOVED, wrong=0.5))
    assert result.sentence.endswith(
        "while all that it was made from matches, except input mask of net, which could not be judged."
    )
    assert result.first is not None and [key.path for key in result.first.unjudged] == ["mask"]


def test_a_forward_pass_that_was_not_judged_as_a_whole(tmp_path: Path) -> None:
    theirs = parts(np.float32, MOVED)
    theirs[-1] = Seen("net.attn", values(7, (16, 16)), "param_grad", path="weight", keep=False)
    result = compared(tmp_path, parts(np.float32, HIDDEN), theirs)
    assert result.sentence.startswith("The forward pass agrees as far as it could be judged; the runs part in the back")


def test_reports_name_unjudged_pairs(tmp_path: Path) -> None:
    result = compared(
        tmp_path, attention(huge(np.float32, HIDDEN), False), attention(huge(np.float32, MOVED), False, off=0.5)
    )
    words = "matched, except input mask, which could not be judged"
    assert f"Its inputs: {words}" in assertion.message(result)
    written = {}
    for report in (comparison_json, comparison_html):
        with (tmp_path / "report").open("wb") as file:
            report.write(result, file)
        written[report] = (tmp_path / "report").read_text()
    assert f"inputs {words}" in written[comparison_html]
    said = json.loads(written[comparison_json])["first"]
    assert said["inputs_matched"] is True
    assert [(each["module"], each["kind"], each["path"]) for each in said["unjudged"]] == [("attn", "input", "mask")]


def test_only_an_unjudged_input(tmp_path: Path) -> None:
    ours, theirs = (
        [Seen("attn", huge(np.float32, hidden), "input", path="mask", keep=False), Seen("attn", values(n), keep=False)]
        for n, hidden in ((1, HIDDEN), (2, MOVED))
    )
    result = compared(tmp_path, ours, theirs)
    assert result.sentence.endswith(", and input mask could not be judged.")
    assert result.first is not None and result.first.inputs_matched is None
    assert rows(result)["attn", "output", 0]["birth"]


def test_a_gradient_that_was_not_recorded_is_not_called_a_match(tmp_path: Path) -> None:
    ours = [seen for seen in parts(np.float32, HIDDEN) if seen.kind != "grad_output"]
    theirs = [*ours[:-1], Seen("net.attn", values(7, (16, 16)), "param_grad", path="weight", keep=False)]
    result = compared(tmp_path, ours, theirs)
    assert result.sentence.endswith("and the gradient at its output was not recorded.")
    assert result.first is not None and result.first.inputs_matched is None

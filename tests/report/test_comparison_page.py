"""The text of the page about a comparison, which fits a screen. Run as a script, this rewrites golden/."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support import comparisons
from support.comparisons import BORN, comparison, decoder, equal, estimated, row, wrong
from tensortap.core.records import Key, Unmatched
from tensortap.report import pairs, unmatched
from tensortap.report.files import comparison_markdown
from tensortap.report.terminal.assertion import describe_pair
from tensortap.report.terminal.comparison import build, render

GOLDEN = Path(__file__).parent / "golden"
SCENES = ("diverged", "from_sketches", "with_nan", "matching", "incomparable")
HOSTILE = ["[red]x[/red]", "a\nb", "\x1b[2J\x1b]0;title\x07", "\u202egnp.exe", "层" * 60, ":smile:", "x" * 300, "[/]"]


def page_text(result: Any, width: int | None = 80, verbose: int = 0) -> str:
    return "".join(f"{line.plain}\n" for line in render(build(result, verbose), width))


@pytest.mark.parametrize("scene", SCENES)
def test_the_page_at_80_columns(scene: str) -> None:
    text = page_text(getattr(comparisons, scene)())
    assert text == (GOLDEN / f"{scene}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("scene", [*SCENES, "large"])
@pytest.mark.parametrize("verbose", [0, 1])
def test_no_line_is_too_long(scene: str, width: int, verbose: int) -> None:
    lines = render(build(getattr(comparisons, scene)(), verbose), width)
    assert max(line.cell_len for line in lines) <= width


@pytest.mark.parametrize("width", [80, 120, None])
def test_a_crowded_comparison_still_fits_one_screen(width: int | None) -> None:
    rows = decoder()
    for at in range(200, 260):
        rows[at]["birth"] = True
    result = comparison(
        rows,
        sentence="A sentence that takes its time to come to the point. " * 4,
        notes=[f"note {n}, as long as notes are when they have a lot to say about a thing" for n in range(9)],
        unmatched=comparisons.incomparable().unmatched,
    )
    text = page_text(result, width)
    assert len(text.splitlines()) <= 23
    assert "born here ◀" in text
    assert "more born elsewhere" in text
    assert "-v shows them" in text


def test_the_rows_are_those_around_the_birth() -> None:
    page = build(comparisons.diverged())
    assert page.rows[page.centre]["module"] == BORN
    assert page.rows[page.centre - 1]["status"] == "close"
    assert page.rows[page.centre + 1]["status"] == "diverged"
    assert [each["seq"] for each in page.rows] == sorted(each["seq"] for each in page.rows)
    assert [birth.key.module for birth in page.births] == ["layers.2.mlp.up"]


def test_verbose_shows_a_hundred_rows_and_then_all() -> None:
    result = comparisons.large(3000)
    assert len(build(result, 1).rows) == 100
    assert len(build(result, 2).rows) == 3000
    assert len(page_text(result, verbose=2).splitlines()) > 3000
    assert "-vv shows all" in page_text(result, verbose=1)
    assert "-vv" not in page_text(result, verbose=2)


def test_verbose_at_the_end_of_the_run_is_filled_from_before() -> None:
    rows = [row(f"m{n}") for n in range(300)]
    rows[298] = wrong("m298", birth=True)
    page = build(comparison(rows), 1)
    assert len(page.rows) == 100
    assert page.rows[page.centre]["birth"]


def test_neighbours_are_of_the_same_rank() -> None:
    rows = [wrong(f"m{n}", rank=n % 2, birth=n == 11) if n > 10 else row(f"m{n}", rank=n % 2) for n in range(20)]
    result = comparison(rows)
    page = build(result)
    assert {each["rank"] for each in page.rows} == {1}
    assert "rank 1)" in page_text(result)


def test_a_finding_without_a_row_is_shown() -> None:
    lost = comparisons.finding(wrong("elsewhere"), row=None)
    text = page_text(comparison(decoder(), first=lost, verdict="diverged"))
    assert BORN in text
    assert "went" in page_text(comparison([], first=lost, verdict="diverged", sentence="It went wrong."))


def test_empty_comparison() -> None:
    for verbose in range(3):
        text = page_text(comparison([], verdict="incomparable", sentence="Nothing in common."), verbose=verbose)
        assert text.startswith("∅ Nothing in common.\n")
        assert "pairs      none" in text


def test_all_equal_needs_no_table() -> None:
    text = page_text(comparison([equal("a"), equal("b")]))
    assert "max abs" not in text
    assert "2: = 2 equal" in text


def test_the_pair_nearest_to_its_tolerance_comes_first() -> None:
    rows = [row("a", rel_l2=1e-6), row("b", rel_l2=1e-5), equal("c"), row("d", rel_l2=None), row("e", rel_l2=4e-6)]
    assert pairs.nearest(comparison(rows), 9) == [1, 4, 0]


def test_estimates_have_an_error_bar() -> None:
    assert pairs.error(estimated("a", 4.1e-3)) == "~4.1e-3 ±7%"
    assert pairs.error(estimated("a", 1e-6, rel_l2_bar=3e-6)) == "~1.0e-6 ±3.0e-6"
    assert pairs.error(estimated("a", 1e-6, rel_l2_bar=None)) == "~1.0e-6"
    assert pairs.error(row("a")) == "2.1e-6"
    assert pairs.error(equal("a")) == "0"
    assert pairs.error(row("a", rel_l2=None, exact=None)) == "–"


def test_every_status_has_a_sign_and_a_word() -> None:
    assert pairs.status_text(equal("a")) == "= equal"
    assert pairs.status_text(row("a")) == "≈ close"
    assert pairs.status_text(wrong("a")) == "✖ diverged"
    assert pairs.status_text(wrong("a", birth=True)) == "✖ born here ◀"
    assert pairs.status_text(row("a", status="nonfinite", nan_candidate=12, inf_candidate=1)) == "✖ 12 NaN 1 Inf"
    assert pairs.status_text(row("a", status="nonfinite", nan_reference=12)) == "✖ no NaN"
    assert pairs.status_text(row("a", status="nonfinite", inf_candidate=12, birth=True)) == "✖ NaN born here ◀"
    assert pairs.status_text(row("a", status="shape")) == "✖ shape"
    assert pairs.status_text(row("a", status="unjudged")) == "? unjudged"


def test_a_non_finite_pair_shows_no_error_of_zero() -> None:
    half = row("a", status="nonfinite", nan_candidate=1, rel_l2=0.0, max_abs=float("inf"), max_abs_index=[4])
    assert (pairs.error(half), pairs.greatest(half), pairs.index(half)) == ("–", "", "4")


def test_other_births_name_the_module_to_look_at() -> None:
    rows = [wrong("a", birth=True), wrong("b.c", birth=True, container="b", cause="container_code")]
    assert "also born  b's code · output 0 · step 3 · off by 4.1e-3\n" in page_text(comparison(rows))
    assert "off by 4.1e-3 · seen at b.c\n" in page_text(comparison(rows), 120, 1)


def test_details_of_the_first() -> None:
    assert pairs.detail(wrong("a")) == "1.262 instead of 1.25 at index 0,3,17; 6.3% of elements off; 50 ULP"
    shapes = row("a", status="shape", shape_candidate=[2, 8], max_abs=None, max_abs_index=None, max_ulp=None)
    assert pairs.detail(shapes) == "2×16×64 in the reference, 2×8 in the candidate"
    within = wrong("a", container="", cause="container_code", max_abs_index=None, mismatched=None, max_ulp=None)
    assert pairs.detail(within) == "in the code of (root), between the modules it calls"


@pytest.mark.parametrize(
    ("container", "cause", "words"),
    [
        ("layer3.1", "container_code", "in the code of layer3.1, between the modules it calls"),
        ("layer3.1", "container_backward", "in the backward of the code of layer3.1, between the modules it calls"),
        ("", "container_backward", "in the backward of the code of (root), between the modules it calls"),
        ("layer3.1.relu", "sent_gradient", "in the backward of layer3.1.relu"),
        ("layer3.1", "parameter_gradient", "in the backward of layer3.1"),  # it reads the weights of a part
        ("layer3.1", "loss", "outside the model, at the output of layer3.1"),
    ],
)
def test_where_a_value_was_born_follows_from_the_cause(container: str, cause: str, words: str) -> None:
    known = {"max_abs_index": None, "mismatched": None, "max_ulp": None, "phase": "backward"}
    one = wrong("layer3.1.bn1", container=container, cause=cause, birth=True, **known)
    assert pairs.detail(one) == words
    result = comparison([wrong("a", birth=True), one])
    assert f"Born {words}" in describe_pair(one) and f", {words}" in comparison_markdown.text(result)
    assert ("'s code ·" in page_text(result)) == ("between" in words)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_in_their_line(name: str) -> None:
    key = Key(3, 0, "forward", name, 0, "output", name)
    result = comparison(
        [row(name, path=name, cls=name), wrong(name, cls=name, birth=True, container=name, rule=name)],
        sentence=name,
        notes=[name],
        policy=name,
        reference=name,
        unmatched=[Unmatched("candidate", key, 0, name)],
    )
    for verbose in (0, 2):
        text = page_text(result, 80, verbose)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert all(line.isprintable() for line in text.splitlines())
        assert len(text.splitlines()) < 60


def test_unmatched_are_grouped_by_common_parts_of_names() -> None:
    groups = unmatched.groups(comparisons.incomparable())
    assert [(group.side, group.name, group.modules, group.tensors) for group in groups[:2]] == [
        ("reference", "layers.*.attn.q_proj", 12, 24),
        ("candidate", "decoder.blocks.*.attention.query", 12, 24),
    ]


def test_many_unmatched_names_become_prefixes() -> None:
    names = ["", *(f"encoder.part{n}.fc" for n in range(30)), "head"]
    rows = [Unmatched("reference", Key(5, 0, "forward", name, 0, "output", "0"), 0, "Linear") for name in names]
    groups = unmatched.groups(comparison([row("a")], unmatched=rows))
    assert [(group.name, group.tensors) for group in groups] == [("encoder.…", 30), ("(root)", 1), ("head", 1)]
    assert unmatched.words(groups[0]) == "∅ reference only: encoder.… (30 tensors, step 5)"


def test_unmatched_records_that_are_not_listed_are_counted() -> None:
    result = comparisons.incomparable()
    assert unmatched.unlisted(result) == ""
    total = len(result.unmatched) + 12_345
    cut = replace(result, counts={**result.counts, "unmatched": total})
    line = f"the groups cover the first {len(result.unmatched)} of {total:,} records"
    assert unmatched.unlisted(cut) == line
    assert line in page_text(cut)
    markdown = comparison_markdown.text(cut)
    assert line in markdown
    assert f"{total:,} records without a counterpart" in markdown


if __name__ == "__main__":
    for each in SCENES:
        (GOLDEN / f"{each}.txt").write_text(page_text(getattr(comparisons, each)()), encoding="utf-8")

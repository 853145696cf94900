"""Every kind of comparison has a page that opens without a message on the console."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reading import column, count_said

from support import comparisons
from tensortap.core.records import Comparison, Key, Unmatched
from tensortap.report.html import comparison as comparison_html


def nothing() -> Comparison:
    return comparisons.comparison([], verdict="incomparable", sentence="Nothing in common.")


def many_ranks() -> Comparison:
    """Sixty ranks, in one of which a shape is wrong."""
    rows = [comparisons.row(f"layers.{n}.fc", rank=rank) for rank in range(60) for n in range(30)]
    rows[700] = comparisons.row("layers.10.fc", rank=23, status="shape", birth=True, shape_candidate=[4], rel_l2=None)
    return comparisons.comparison(rows, sentence="The runs part in layers.10.fc.")


def mapped() -> Comparison:
    """A record with another name in the candidate, and one with known norms alone."""
    names = {"module_candidate": "linear1", "path_candidate": "w", "layout": "transposed"}
    rows = [
        comparisons.estimated("fc1", 0.25, rel_l2_bar=float("inf"), status="diverged", birth=True, **names),
        comparisons.row("fc2"),
    ]
    lost = Unmatched("candidate", Key(3, 0, "state", "extra", 0, "param", "weight"), 0, "Linear", "no rule fits")
    return comparisons.comparison(rows, sentence="The runs part in fc1.", unmatched=[lost])


def test_the_candidates_names_and_bounds_are_shown(visit: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with path.open("wb") as file:
        comparison_html.write(mapped(), file)
    page = visit(path)
    assert "in the candidate: linear1 · w · transposed" in page.locator("#tensor").inner_text()
    assert "≥ 0.25" in page.locator("#tensor .measures").first.inner_text()
    page.get_by_role("tab", name="Unmatched").click()
    assert "no rule fits" in page.locator("#panel-unmatched").inner_text()
    page.locator("#filter").fill("linear1")
    assert count_said(page) == 1


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (comparisons.diverged, 372),
        (comparisons.from_sketches, 372),
        (comparisons.with_nan, 372),
        (comparisons.matching, 5),
        (comparisons.incomparable, 1),
        (nothing, 0),
        (mapped, 2),
        (many_ranks, 30),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_it_opens(visit: Any, tmp_path: Path, make: Callable[[], Comparison], rows: int) -> None:
    comparison = make()
    path = tmp_path / "page.html"
    with path.open("wb") as file:
        comparison_html.write(comparison, file)
    page = visit(path)
    assert comparison.sentence.split(":")[0] in page.locator("#banner .sentence").inner_text()
    assert count_said(page) == rows
    assert bool(column(page, 0)) == bool(rows)
    assert page.locator("#tensor").is_visible() or not comparison.births
    assert page.locator("#notes li").count() == len(comparison.notes)
    for tab in range(page.get_by_role("tab").count()):
        page.get_by_role("tab").nth(tab).click()
    page.get_by_role("button", name="dark").click()
    for key in "npjk":
        page.keyboard.press(key)


def test_a_non_finite_pair_ranks_above_every_error(visit: Any, tmp_path: Path) -> None:
    bad = comparisons.row("fc\u202ekcab", rel_l2=0.0, status="nonfinite", birth=True, nan_candidate=3)
    path = tmp_path / "page.html"
    with path.open("wb") as file:
        comparison_html.write(comparisons.comparison([comparisons.row("fc1", rel_l2=0.5), bad]), file)
    page = visit(path)
    heads = page.locator(".table-panel [role=columnheader]").all_inner_texts()
    at = next(place for place, head in enumerate(heads) if head.startswith("rel. error"))
    page.get_by_role("columnheader", name="rel. error").click()
    assert column(page, at) == ["∞", "0.5"]
    assert column(page, 1) == ["fc\\u202ekcab", "fc1"]
    assert "relative error\n∞" in page.locator("#tensor .measures").first.inner_text()
    page.locator("#filter").fill("fc1")
    assert page.locator(".table-panel .grid-body .grid-row").count() == 1  # hidden parts have no elements

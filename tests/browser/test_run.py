"""The page about one run."""

from __future__ import annotations

from typing import Any

from reading import chosen, column, hash_of, tensor_title


def test_it_opens_where_the_nan_is_born(visit: Any, runs: Any) -> None:
    page = visit(runs.run)
    assert "NaN or Inf is born in output 0 of root" in page.locator("#banner").inner_text()
    assert tensor_title(page).startswith("root output 0 · forward · step 2")
    assert "born here" in chosen(page)
    assert page.locator("#tensor .bars .edge.reference").count() == 1 and page.locator("#tensor .worst").count() == 0


def test_suspicious_records_are_named(visit: Any, runs: Any) -> None:
    page = visit(runs.run, "step=0")
    page.get_by_label("suspicious only").check()
    assert column(page, 0) == ["○ dead ◀"] and column(page, 1) == ["quiet"]
    page.get_by_role("tab", name="Findings").click()
    assert "quiet" in page.locator("#panel-births").inner_text()


def test_gradient_norms_and_trends(visit: Any, runs: Any) -> None:
    page = visit(runs.run, "tab=gradients")
    assert page.locator("#panel-gradients canvas").count() == 2
    page.get_by_role("tab", name="Trend").click()
    page.get_by_label("statistic").select_option(label="share of zeros")
    assert page.locator("#panel-trend canvas").is_visible() and hash_of(page)["trend"] == "zeros"


def test_findings_without_scripts(visit: Any, runs: Any) -> None:
    page = visit(runs.run, scripts=False)
    assert page.locator("#births li").count() >= 2
    assert "Suspicious" in page.locator("#header").inner_text()

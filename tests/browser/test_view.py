"""The same page from `tensortap view`: parts that are not in it come from its own server."""

from __future__ import annotations

from typing import Any

from reading import tensor_title


def test_every_tensor_has_details(visit: Any, served: str) -> None:
    page = visit(served)
    assert page.locator("script[id^=column-]").count() == 0
    assert tensor_title(page).startswith("side output 0")
    for _ in range(3):
        page.keyboard.press("j")
        page.locator("#tensor").get_by_role("heading", name="Values").wait_for()
        assert page.locator("#tensor .hint", has_text="tensortap view").count() == 0


def test_looking_closer_at_the_map(visit: Any, served: str) -> None:
    page = visit(served)
    panel = page.locator("#tensor .error-map")
    panel.locator("canvas").click(position={"x": 5, "y": 5})
    panel.get_by_text("rows 0–1, columns 0–3").wait_for()
    panel.get_by_role("button", name="show values").click()
    panel.locator(".slice td").first.wait_for()
    reference, candidate = panel.locator(".slice td").first.inner_text().split("\n")
    assert abs(float(candidate) / float(reference) - 1.01) < 1e-4
    panel.get_by_role("button", name="whole tensor").click()
    assert "8 × 16" in panel.inner_text()


def test_one_run_has_elements_too(visit: Any, served_run: str) -> None:
    page = visit(served_run)
    panel = page.locator("#tensor .part", has_text="Elements")
    panel.get_by_label("first row").fill("1")
    panel.get_by_role("button", name="show values").click()
    panel.locator(".slice td").first.wait_for()
    assert panel.locator(".slice tbody th").first.inner_text() == "1"


def test_the_page_reports_a_server_that_has_ended(visit: Any, served: str) -> None:
    page = visit(served)
    page.evaluate("() => { window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); }")
    page.keyboard.press("j")
    page.locator("#tensor [role=alert]", has_text="tensortap view has stopped").wait_for()

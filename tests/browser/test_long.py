"""A page of many rows: few elements, and the last row can be reached."""

from __future__ import annotations

from typing import Any

from reading import chosen, column, count_said, hash_of


def test_only_visible_rows_have_elements(visit: Any, long_page: Any) -> None:
    page = visit(long_page, "step=all")
    assert count_said(page) == 400_000
    assert page.locator(".grid-row").count() < 100
    grid = page.get_by_role("grid", name="All pairs")
    grid.focus()
    page.keyboard.press("End")
    assert hash_of(page)["row"] == "399999" and chosen(page)
    scroller = page.locator(".table-panel .grid-scroll")
    scroller.evaluate("node => (node.scrollTop = node.scrollHeight)")
    page.wait_for_timeout(100)
    last = page.locator(".table-panel .grid-row[aria-rowindex='400001']")
    assert (
        last.bounding_box()["y"] + last.bounding_box()["height"]
        <= scroller.bounding_box()["y"] + scroller.bounding_box()["height"] + 1
    )
    page.get_by_label("failing only").check()
    assert count_said(page) == 200_000 and "close" not in " ".join(column(page, 0))
    page.locator("#filter").fill("nothing")
    page.locator(".table-panel output", has_text="0 of 400,000 rows").wait_for()

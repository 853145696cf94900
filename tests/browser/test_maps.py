"""The maps on a canvas: keys reach every cell, show the text of the tooltip, and act like a click."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reading import column, count_said, hash_of

from support import comparisons
from tensortap.report.html import comparison as comparison_html

HEAT, GRADIENTS, TILES = ".heat-panel", "#panel-gradients", "#tensor .error-map"
# Row and column of the focus, and their label.
FOCUSED = """() => {
  const cell = document.activeElement;
  return [cell.role, cell.parentElement.ariaRowIndex, cell.ariaColIndex, cell.ariaLabel];
}"""


def enter(page: Any, panel: str) -> Any:
    """Press Tab until the focus is in the map; return the focused cell."""
    page.locator(f"{panel} .map .cell").wait_for()
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("panel => document.activeElement.matches(`${panel} .map .cell`)", panel):
            return page.locator(f"{panel} .map .cell")
    raise AssertionError(f"Tab never leads to {panel}")


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def middle(cell: Any) -> tuple[float, float]:
    box = cell.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.parametrize(
    ("name", "hash", "panel"),
    [("comparison", "", HEAT), ("comparison", "", TILES), ("run", "tab=gradients", GRADIENTS)],
    ids=["ranks and layers", "tiles of a tensor", "layers and steps"],
)
def test_keys_show_the_same_text_as_the_mouse(visit: Any, runs: Any, name: str, hash: str, panel: str) -> None:
    page = visit(getattr(runs, name), hash)
    cell, tip = enter(page, panel), page.locator(f"{panel} .map-frame .tip")
    assert page.locator(f"{panel} .map [tabindex]").count() == 1
    assert tip.get_attribute("aria-live") == "polite"
    said = []
    for keys in ((), ("ArrowRight",), ("ArrowDown",), ("End",), ("ArrowUp",)):
        press(page, *keys)
        told = cell.get_attribute("aria-label")
        assert tip.is_visible() and tip.inner_text() == told
        page.mouse.move(*middle(cell))
        assert page.locator(f"{panel} .map canvas").get_attribute("title") == told
        said.append(told)
    assert len(set(said)) == len(said)
    frame, shown = (page.locator(f"{panel} {each}").bounding_box() for each in (".map-frame", ".map-frame .tip"))
    assert frame["x"] - 1 <= shown["x"] and shown["x"] + shown["width"] <= frame["x"] + frame["width"] + 1
    page.keyboard.press("Tab")
    assert not tip.is_visible() and not cell.evaluate("cell => cell === document.activeElement")


def test_the_focus_can_be_seen_on_any_colour(visit: Any, runs: Any) -> None:
    for scheme in ("light", "dark"):
        page = visit(runs.comparison, color_scheme=scheme)
        enter(page, HEAT)
        ring, gap, text, panel = page.evaluate(
            """() => {
              const { outlineStyle, outlineColor, boxShadow } = getComputedStyle(document.activeElement);
              const { color } = getComputedStyle(document.body);
              const { backgroundColor } = getComputedStyle(document.querySelector(".panel"));
              return [`${outlineStyle} ${outlineColor}`, boxShadow, color, backgroundColor];
            }"""
        )
        assert ring == f"solid {text}" and gap.startswith(panel)  # one of the two is far from the cell's own colour


def test_keys_stop_at_the_edges(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    enter(page, HEAT)
    for keys, place in (
        (("ArrowUp",), ["gridcell", "1", "2"]),
        (("End", "ArrowRight"), ["gridcell", "1", "7"]),
        (("ArrowDown", "ArrowDown"), ["gridcell", "2", "7"]),
        (("PageUp",), ["gridcell", "1", "7"]),
        (("PageDown",), ["gridcell", "2", "7"]),
        (("Home", "ArrowLeft"), ["rowheader", "2", "1"]),
    ):
        press(page, *keys)
        assert page.evaluate(FOCUSED)[:3] == place, keys
    assert page.evaluate(FOCUSED)[3] == "rank 1"
    grid = page.get_by_role("grid", name="Errors of 2 ranks in 6 layers")
    assert [grid.get_attribute(name) for name in ("aria-rowcount", "aria-colcount")] == ["2", "7"]


def test_enter_narrows_as_a_click_does_and_takes_it_back(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    cell = enter(page, HEAT)
    press(page, "ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight")
    assert (cell.get_attribute("aria-selected"), cell.get_attribute("aria-label")[:17]) == (
        "false",
        "rank 1 · layers.1",
    )
    page.keyboard.press("Enter")
    narrowed = hash_of(page)
    assert (narrowed["rank"], narrowed["module"]) == ("1", "layers.1")
    assert all(name.startswith("layers.1") for name in column(page, 1))
    assert page.evaluate(FOCUSED)[1:3] == ["2", "5"] and cell.get_attribute("aria-selected") == "true"
    page.keyboard.press("Space")
    assert (hash_of(page)["rank"], hash_of(page).get("module")) == ("all", None)
    page.mouse.click(*middle(cell))
    assert hash_of(page) == narrowed
    assert not page.locator(f"{HEAT} .tip").is_visible()  # the mouse has a tooltip of its own


def test_enter_on_a_rank_narrows_to_all_of_it(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    enter(page, HEAT)
    press(page, "ArrowDown", "Home", "Enter")
    assert hash_of(page)["rank"] == "1" and "module" not in hash_of(page) and count_said(page) == 76


def test_keys_go_on_from_where_one_clicked(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    box = page.locator(f"{HEAT} canvas").bounding_box()
    page.mouse.click(box["x"] + 56 + (box["width"] - 56) * 3.5 / 6, box["y"] + box["height"] - 5)
    enter(page, HEAT)
    assert page.evaluate(FOCUSED)[1:3] == ["2", "5"]


def test_the_focused_element_scrolls_into_view(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    cell = enter(page, HEAT)
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    assert cell.bounding_box()["y"] < 0
    page.keyboard.press("ArrowRight")
    toolbar = page.locator(".toolbar").bounding_box()
    assert toolbar["y"] + toolbar["height"] <= cell.bounding_box()["y"] < 850


def test_many_ranks_and_layers_are_reached(visit: Any, tmp_path: Path) -> None:
    rows = [comparisons.row(f"layers.{n}.fc", rank=rank, rel_l2=1e-6) for rank in range(200) for n in range(90)]
    rows[-1] = comparisons.wrong("layers.89.fc", rank=199, birth=True)
    path = tmp_path / "page.html"
    with path.open("wb") as file:
        comparison_html.write(comparisons.comparison(rows), file)
    page = visit(path)
    cell = enter(page, HEAT)
    press(page, *["PageDown"] * 20, "End")
    assert cell.get_attribute("aria-label") == "rank 199 · layers.89: 4.10e-3, 1 born here"
    page.keyboard.press("Enter")
    assert hash_of(page)["module"] == "layers.89"
    assert page.evaluate("document.querySelectorAll('.map *').length") < 10  # however many cells there are


def test_a_map_that_does_nothing_does_nothing(visit: Any, runs: Any) -> None:
    page = visit(runs.run, "tab=gradients")
    enter(page, GRADIENTS)
    press(page, "ArrowRight")
    before = page.url
    press(page, "Enter", "Space")
    assert page.url == before and page.evaluate(FOCUSED)[3].startswith("fc · step 1: ")
    assert page.locator(f"{GRADIENTS} .map.acts").count() == 0


def test_enter_zooms_in_and_zooming_out_keeps_the_focus(visit: Any, served: str) -> None:
    page = visit(served)
    cell, panel = enter(page, TILES), page.locator(TILES)
    press(page, *["ArrowDown"] * 5, *["ArrowRight"] * 7)
    assert cell.get_attribute("aria-label").startswith("row 5, column 7: ")
    page.keyboard.press("Enter")
    panel.get_by_text("rows 4–5, columns 5–8").wait_for()
    assert cell.get_attribute("aria-label").startswith("row 5, column 7: ")  # the same element, at another place
    assert page.evaluate(FOCUSED)[1:3] == ["2", "3"]
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    panel.get_by_text("8 × 16").wait_for()
    assert page.evaluate(FOCUSED)[3].startswith("row 4, column 5: ")

"""The tree of modules: few elements however many there are, and every module can be reached by mouse and by keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reading import column, count_said, hash_of

from support import comparisons
from tensortap.report.html import comparison as comparison_html

MIDDLE = "layers.25000"
# Modules from the top down that can be seen, at least a part of each.
IN_VIEW = """(list) => {
  const view = list.parentElement.getBoundingClientRect();
  return [...list.children]
    .map((item) => [item.getBoundingClientRect(), item.title])
    .filter(([box]) => box.bottom > view.top + 1 && box.top < view.bottom - 1)
    .sort(([one], [other]) => one.top - other.top)
    .map(([, title]) => title.split(" ")[0]);
}"""
# The focused module: its name, whether all of it can be seen, and its label for assistive technology.
FOCUSED = """() => {
  const item = document.activeElement;
  const view = document.querySelector(".tree-scroll").getBoundingClientRect();
  const box = item.getBoundingClientRect();
  return {
    name: item.title.split(" ")[0],
    seen: box.top >= view.top - 1 && box.bottom <= view.bottom + 1,
    role: item.role, level: item.ariaLevel, open: item.ariaExpanded, at: `${item.ariaPosInSet}/${item.ariaSetSize}`,
  };
}"""
# A key in the very moment in which the tree is scrolled to its top, before that is drawn.
AT_ONCE = """() => {
  document.querySelector(".tree-scroll").scrollTop = 0;
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
}"""


def in_view(page: Any) -> list[str]:
    page.wait_for_timeout(100)  # the scroll event comes in the next frame
    return list(page.locator(".tree").evaluate(IN_VIEW))


def focused(page: Any) -> str:
    """The name of the focused module, all of which can be seen."""
    found = page.evaluate(FOCUSED)
    assert found["seen"] and found["role"] == "treeitem", found
    return str(found["name"])


def aria_position(page: Any) -> tuple[str, str, str | None]:
    found = page.evaluate(FOCUSED)
    return found["level"], found["at"], found["open"]


def scroll(page: Any, place: str) -> None:
    page.locator(".tree-scroll").evaluate(f"node => (node.scrollTop = {place})")


def modules(first: int, last: int) -> list[str]:
    return [f"layers.{number}" for number in range(first, last)]


@pytest.fixture
def page(visit: Any, wide_page: Path) -> Any:
    return visit(wide_page)


@pytest.fixture
def keys(page: Any) -> Any:
    """The page with the focus in its tree."""
    page.locator(".tree [tabindex='0']").focus()
    return page


def test_only_visible_rows_have_elements(page: Any) -> None:
    assert page.locator(".tree li").count() < 60
    assert page.evaluate("document.querySelectorAll('*').length") < 2000
    assert page.locator(".tree [aria-current=true]").get_attribute("title").startswith(f"{MIDDLE}.fc")
    assert f"{MIDDLE}.fc" in in_view(page)


def test_scrolling_shows_every_part_in_its_place(page: Any) -> None:
    scroll(page, "0")
    top = in_view(page)
    assert top == ["(root)", "layers", *modules(0, len(top) - 2)] and len(top) > 20
    scroll(page, "node.scrollHeight")
    end = in_view(page)
    assert end == modules(50_000 - len(end), 50_000)
    scroll(page, "25 * (2 + 30_000 + 1)")  # the one that is open in the middle has a line more
    middle = in_view(page)
    assert middle == modules(30_000, 30_000 + len(middle))
    assert page.locator(".tree li").count() < 60


def test_elements_are_in_the_order_of_their_content(page: Any) -> None:
    for place in ("0", "2000", "1700", "node.scrollHeight", "600_000", "600_300"):
        scroll(page, place)
        page.wait_for_timeout(50)
        lines = page.locator(".tree li").evaluate_all("items => items.map((item) => item.getBoundingClientRect().top)")
        assert lines == sorted(lines)


def test_keys_go_to_the_ends_by_lines_and_by_pages(keys: Any) -> None:
    assert focused(keys) == "(root)"
    keys.keyboard.press("End")
    assert focused(keys) == "layers.49999"
    keys.keyboard.press("ArrowDown")
    assert focused(keys) == "layers.49999"
    keys.keyboard.press("ArrowUp")
    assert focused(keys) == "layers.49998"
    keys.keyboard.press("PageUp")
    before = int(focused(keys).partition(".")[2])
    assert 49_998 - 60 < before < 49_998 - 10
    keys.keyboard.press("PageDown")
    assert focused(keys) == "layers.49998"
    keys.keyboard.press("Home")
    assert focused(keys) == "(root)"
    for name in ("layers", *modules(0, 60)):
        keys.keyboard.press("ArrowDown")
        assert focused(keys) == name


def test_assistive_technology_counts_modules_without_elements(keys: Any) -> None:
    assert aria_position(keys) == ("1", "1/1", "true")
    keys.keyboard.press("ArrowDown")
    assert aria_position(keys) == ("2", "1/1", "true")
    keys.keyboard.press("End")
    assert aria_position(keys) == ("3", "50000/50000", "false")
    keys.keyboard.press("ArrowRight")
    assert aria_position(keys) == ("3", "50000/50000", "true")
    keys.keyboard.press("ArrowRight")
    assert focused(keys) == "layers.49999.fc"
    assert aria_position(keys) == ("4", "1/1", None)
    assert keys.get_by_role("tree", name="Modules").locator("[aria-selected=true]").count() == 0


def test_modules_open_close_and_are_chosen_by_keys(keys: Any) -> None:
    keys.keyboard.press("End")
    for key, name in (
        ("ArrowRight", "layers.49999"),
        ("ArrowDown", "layers.49999.fc"),
        ("ArrowLeft", "layers.49999"),
        ("ArrowLeft", "layers.49999"),
        ("ArrowDown", "layers.49999"),  # closed again: there is nothing below
        ("ArrowLeft", "layers"),
    ):
        keys.keyboard.press(key)
        assert focused(keys) == name, key
    keys.keyboard.press("End")
    keys.keyboard.press("Enter")
    assert hash_of(keys)["module"] == focused(keys) == "layers.49999"
    assert column(keys, 1) == ["layers.49999.fc"] and count_said(keys) == 1
    assert keys.locator(".tree [aria-selected=true]").get_attribute("title").startswith("layers.49999")
    keys.keyboard.press("Space")
    assert "module" not in hash_of(keys) and count_said(keys) == 50_000
    keys.keyboard.press("Home")
    keys.keyboard.press("ArrowLeft")  # all of it is closed
    assert keys.locator(".tree li").count() == 1 and focused(keys) == "(root)"


def test_the_focus_survives_scrolling(keys: Any) -> None:
    keys.keyboard.press("ArrowDown")
    keys.keyboard.press("ArrowDown")
    scroll(keys, "600_000")
    assert "layers.0" not in in_view(keys) and keys.locator(".tree li").count() < 60
    found = keys.evaluate(FOCUSED)
    assert found["name"] == "layers.0" and not found["seen"]
    keys.keyboard.press("Tab")
    keys.keyboard.press("Shift+Tab")  # back to where one was
    assert focused(keys) == "layers.0"
    scroll(keys, "node.scrollHeight")
    keys.wait_for_timeout(100)
    keys.keyboard.press("ArrowDown")
    assert focused(keys) == "layers.1"
    scroll(keys, "node.scrollHeight")
    keys.wait_for_timeout(100)
    keys.evaluate(AT_ONCE)
    assert focused(keys) == "layers.2"
    assert keys.locator(".tree [tabindex='0']").count() == 1


def test_the_tree_stays_where_it_is_when_a_module_is_clicked(page: Any) -> None:
    scroll(page, "400_000")
    there = in_view(page)
    item = page.locator(f".tree li[title='{there[9]}']")
    item.locator(".label").click()
    assert hash_of(page)["module"] == there[9] and column(page, 1) == [f"{there[9]}.fc"]
    assert in_view(page) == there
    item.locator(".twist").click()
    assert item.get_attribute("aria-expanded") == "true" and hash_of(page)["module"] == there[9]
    assert in_view(page) == [*there[:10], f"{there[9]}.fc", *there[10:-1]]
    page.locator(".scope-module").click()
    assert in_view(page)[9] == there[9] and count_said(page) == 50_000


def test_choosing_a_row_opens_and_shows_its_module(page: Any) -> None:
    page.get_by_role("grid", name="All pairs").focus()
    page.keyboard.press("Home")
    assert "layers.0.fc" in in_view(page)
    page.locator(".tree [tabindex='0']").focus()  # also while the tree has the focus
    page.keyboard.press("n")
    assert f"{MIDDLE}.fc" in in_view(page)
    page.keyboard.press("End")
    page.keyboard.press("k")  # another one opens, and the focused module moves to another line
    assert "layers.24999.fc" in in_view(page)
    assert page.evaluate(FOCUSED)["name"] == "layers.49999"


def test_a_deep_tree_is_as_deep_as_it_is(visit: Any, tmp_path: Path) -> None:
    names = [".".join(["a"] * depth) for depth in range(1, 301)]
    path = tmp_path / "deep.html"
    with path.open("wb") as file:
        comparison_html.write(comparisons.comparison([comparisons.row(name) for name in names]), file)
    page = visit(path, "row=299")
    assert in_view(page)[-1] == names[-1]
    page.locator(".tree [tabindex='0']").focus()
    page.keyboard.press("End")
    assert focused(page) == names[-1] and aria_position(page) == ("301", "1/1", None)
    for name in (names[-2], names[-2], names[-3]):  # up, closed, up
        page.keyboard.press("ArrowLeft")
        assert focused(page) == name
    assert in_view(page)[-1] == names[-2]

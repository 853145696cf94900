"""Keyboard access to everything, and the information for assistive technology."""

from __future__ import annotations

from typing import Any

import pytest
from reading import CONTRASTS, chosen, count_said, hash_of, tensor_title


def test_births_and_rows(visit: Any, runs: Any, births: Any) -> None:
    page = visit(runs.comparison)
    seen = [tensor_title(page)]
    for _ in births[1:]:
        page.keyboard.press("n")
        seen.append(tensor_title(page))
    wanted = [(birth.key.module, f"rank {birth.rank}") for birth in births]
    assert [(title.split(" ")[0], f"rank {title.split('rank ')[1][0]}") for title in seen] == wanted
    page.keyboard.press("p")
    assert tensor_title(page) == seen[-2]
    page.keyboard.press("j")
    assert "born here" not in chosen(page)
    page.keyboard.press("k")
    assert "born here" in chosen(page)


def test_filter_help_and_escape(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    page.keyboard.press("/")
    page.keyboard.type("njk?/")  # letters are letters while one writes
    assert page.locator("#filter").input_value() == "njk?/" and count_said(page) == 0
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") != "filter"
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible() and page.locator("#tensor").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#tensor").is_visible() and hash_of(page)["row"] == "all"
    page.keyboard.press("n")
    assert page.locator("#tensor").is_visible()


def test_arrows_in_table_and_tree(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    page.get_by_role("grid", name="All pairs").focus()
    page.keyboard.press("Home")
    first = chosen(page)
    page.keyboard.press("End")
    assert chosen(page) != first
    active = page.get_by_role("grid", name="All pairs").get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    page.locator(".tree [tabindex='0']").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert hash_of(page)["module"] == "side"


def test_the_focused_element_is_visible(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison)
    for _ in range(12):
        page.keyboard.press("Tab")
        outline = page.evaluate(
            "getComputedStyle(document.activeElement).outlineStyle + document.activeElement.tagName"
        )
        assert not outline.startswith("none"), outline


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(visit: Any, runs: Any, scheme: str) -> None:
    page = visit(runs.comparison, color_scheme=scheme)
    for tab in range(page.get_by_role("tab").count()):
        page.get_by_role("tab").nth(tab).click()
        readable(page)
    readable(visit(runs.run, color_scheme=scheme))


def readable(page: Any) -> None:
    found = page.evaluate(CONTRASTS)
    assert len(found) > 100
    assert [entry for entry in found if entry[0] < 4.5] == []


def test_the_reader_may_choose_the_theme(visit: Any, runs: Any) -> None:
    page = visit(runs.comparison, color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="dark").click()
    assert page.evaluate(background) != light
    readable(page)

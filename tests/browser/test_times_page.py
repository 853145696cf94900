"""The page about the time of modules: its icicle with the mouse and with keys, and what is there without scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.traces import ENGINE, Trace
from tensortap.report.html import times as times_html
from tensortap.times.facts import facts_of
from tensortap.times.icicle import icicle_of
from tensortap.times.table import make_table

Open = Callable[..., Any]
HOSTILE = "<img src=x onerror=alert`1`>"


@pytest.fixture(scope="module")
def times_page(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Path:
    """Two layers, one of which launches most of the work; a tiny one; an optimizer; a class with a hostile name."""
    folder = tmp_path_factory.mktemp("times")
    trace = Trace()
    trace.module("forward (root) (Net)", 10, 1010)
    trace.module(f"forward layers.0 ({HOSTILE})", 100, 300)
    trace.module("forward layers.1 (Block)", 400, 900)
    trace.module("forward layers.1.fc (Linear)", 450, 850)
    trace.module("forward layers.1.tiny (ReLU)", 860, 860.5, mark=0.1)
    trace.node("AddmmBackward0", 1100, 1300, tid=ENGINE)
    trace.backward(["(root) (Net)", "layers.1 (Block)", "layers.1.fc (Linear)"], 1110, 1290, tid=ENGINE)
    trace.span("Optimizer.step#AdamW.step", 1400, 1500)
    trace.launch(1, 150)
    trace.launch(2, 500)
    trace.kernel(1, 2000, 900)
    trace.kernel(2, 3000, 100)
    path = folder / "times.html"
    ledger = trace.ledger(folder)
    with path.open("wb") as file:
        times_html.write({**facts_of(ledger, make_table(ledger)), "trace": "runs/trace.json"}, icicle_of(ledger), file)
    return path


def cell(page: Any, label: str) -> Any:
    return page.locator(".icicle .cell", has=page.locator(".label", has_text=label)).first


def name(page: Any) -> str:
    return str(page.locator(".figures h2 code").inner_text())


def width(box: Any) -> float:
    return float(box.bounding_box()["width"])


def test_modules_are_as_wide_as_their_time(times_page: Path, visit: Open) -> None:
    page = visit(times_page)
    layers = [cell(page, label) for label in ("0", "1")]  # device time is what it begins with
    assert width(layers[0]) / width(layers[1]) == pytest.approx(9, rel=0.05)
    page.get_by_label("Time", exact=True).select_option("cpu")
    layers = [page.locator('.cell[aria-label^="layers.0 "]'), page.locator('.cell[aria-label^="layers.1 "]')]
    forward_and_backward = 500 - 4 - 0.4 + 184 + 10
    assert width(layers[1]) / width(layers[0]) == pytest.approx(forward_and_backward / 200, rel=0.05)
    page.get_by_label("Phase").select_option("backward")
    assert page.locator('.cell[aria-label^="layers.0 "]').count() == 0


def test_keys_lead_through_the_tree(times_page: Path, visit: Open) -> None:
    page = visit(times_page)
    page.get_by_label("Time", exact=True).select_option("cpu")
    page.locator('.icicle .cell[tabindex="0"]').focus()
    seen = []
    for key in ("ArrowDown", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
        seen.append(name(page))
        assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(seen[-1])
    assert seen[0] == "(root)" and seen[2] == "(root)" and seen[1].startswith("(")
    assert seen[3:] == ["layers", "layers.0", "layers.1", "layers.1.fc", "layers.1"]
    whole = width(page.locator(".icicle"))
    page.keyboard.press("Enter")
    assert width(page.locator(".cell.zoomed")) == pytest.approx(whole, abs=1)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("layers.1 ")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert name(page) == "layers.1.tiny"  # too narrow to be drawn: it is zoomed to
    page.keyboard.press("Home")
    assert name(page) == "whole profile"
    page.keyboard.press("Escape")
    assert name(page) == "whole profile"


def test_the_mouse_shows_a_tooltip_and_zooms(times_page: Path, visit: Open) -> None:
    page = visit(times_page)
    page.get_by_label("Time", exact=True).select_option("cpu")
    layer = page.locator('.cell[aria-label^="layers.1 "]')
    layer.hover()
    assert "layers.1 (Block)" in page.locator(".icicle-frame .tip").inner_text()
    assert name(page) == "layers.1"
    layer.click()
    assert page.locator('.cell[aria-label^="layers.0 "]').count() == 0
    page.get_by_role("button", name="Whole profile").click()
    assert page.locator('.cell[aria-label^="layers.0 "]').count() == 1


def test_figures_of_a_module(times_page: Path, visit: Open) -> None:
    page = visit(times_page)
    page.locator('.cell[aria-label^="layers.1.fc "]').click()
    rows = [row.split("\t") for row in page.locator(".figures tbody").inner_text().splitlines()]
    assert rows[0][:3] == ["forward", "1", "400 µs"]
    assert rows[1][:3] == ["backward", "1", "192 µs"]
    assert rows[2][0] == "together" and rows[2][2] == "592 µs"
    assert "100 µs" in rows[0]  # on the device


def test_names_are_text_and_rows_are_there_without_scripts(times_page: Path, visit: Open) -> None:
    page = visit(times_page)
    assert HOSTILE in page.locator('.cell[aria-label^="layers.0 "]').get_attribute("aria-label")
    page = visit(times_page, scripts=False)
    text = page.locator("#rows").inner_text()
    assert "layers.1.fc" in text and "900 µs" in text and HOSTILE in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_can_be_read_in_both_themes(scheme: str, times_page: Path, visit: Open) -> None:
    page = visit(times_page, color_scheme=scheme)
    contrast = """
    () => {
      const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
      const light = (text) => {
        const canvas = document.createElement("canvas").getContext("2d");
        canvas.fillStyle = text;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) => channel(value / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      return [...document.querySelectorAll(".icicle .cell:has(.label)")].map((cell) => {
        const style = getComputedStyle(cell);
        const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
      });
    }
    """
    assert min(page.evaluate(contrast)) >= 4.5

"""Functions with which tests read a page and navigate in it."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs

__all__ = ["CONTRASTS", "chosen", "column", "count_said", "hash_of", "plot_place", "tensor_title"]

# Every visible piece of text with the contrast to what is behind it, the worst first.
CONTRASTS = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = channels(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim().slice(0, 40);
    if (!text || node.closest("script, style, noscript") || !node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    const svg = node.closest("svg");
    const [one, other] = [light(channels(svg ? style.fill : style.color)), light(behind(node))].sort((a, b) => b - a);
    found.push([(one + 0.05) / (other + 0.05), text, String(node.className)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}"""

DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Wait for the next frame, which draws the scrolled content."""
CELLS = """(rows, at) => rows
  .sort((one, other) => one.ariaRowIndex - other.ariaRowIndex)
  .map((row) => row.querySelectorAll("[role=gridcell]")[at].innerText)"""


def column(page: Any, at: int) -> list[str]:
    """A column of the table as it can be seen, from the top down."""
    page.evaluate(DRAWN)
    return list(page.locator(".table-panel .grid-body .grid-row:visible").evaluate_all(CELLS, at))


def chosen(page: Any) -> str:
    """The marked row, its cells joined."""
    return str(page.locator(".table-panel .grid-row[aria-selected=true]").inner_text()).replace("\n", " ")


def count_said(page: Any) -> int:
    """How many rows the table says it shows."""
    found = re.match(r"[\d,]+", page.locator(".table-panel output").inner_text())
    assert found is not None
    return int(found[0].replace(",", ""))


def tensor_title(page: Any) -> str:
    return f"{page.locator('#tensor h2').inner_text()} {page.locator('#tensor .identity').inner_text()}"


def hash_of(page: Any) -> dict[str, str]:
    page.evaluate(DRAWN)
    fragment = page.evaluate("location.hash").removeprefix("#")  # the browser's driver knows of it a little later
    return {name: values[0] for name, values in parse_qs(fragment, keep_blank_values=True).items()}


def plot_place(page: Any, words: str) -> tuple[float, float]:
    """A point of the plot whose tooltip has these words, found by moving along it as a hand would."""
    over = page.locator(".order-panel .u-over").bounding_box()
    for share in range(160):
        x, y = over["x"] + over["width"] * (share + 0.5) / 160, over["y"] + over["height"] / 2
        page.mouse.move(x, y)
        tip = page.locator(".order-panel .tip")
        if tip.is_visible() and words in tip.inner_text():
            return x, y
    raise AssertionError(f"nowhere in the plot: {words}")

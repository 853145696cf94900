"""The map of ranks and layers where the records of several ranks were joined: its rows are positions in the mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reading import hash_of

import tensortap as tt
from support.parallel_world import run_world
from tensortap.core.records import Comparison

MISTAKE = "no_reduce:layers.1.mlp.down"
HEAT = ".heat-panel"


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("mesh")
    one = run_world(folder / "one", steps=1)
    return tt.compare(one, run_world(folder / "four", {"dp": 2, "tp": 2}, steps=1, mistakes=[MISTAKE]))


def test_the_ranks_of_each_pair_are_known(joined: Comparison) -> None:
    parts = joined.rank_parts
    assert parts is not None and parts.side == "candidate" and parts.axes == ("dp", "tp")
    assert dict(parts.coordinates) == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    assert len(parts.of_pair) == len(joined)
    assert {tuple(parts.holders[at]) for at in set(parts.of_pair.tolist())} == {(0, 1, 2, 3)}


def test_rows_are_positions_in_the_mesh(visit: Any, joined: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    joined.save(path)
    page = visit(path)
    panel = page.locator(HEAT)
    assert panel.locator("h2").inner_text() == "Rank (dp × tp) × layer"
    grid = panel.locator("[role=grid]")
    assert grid.get_attribute("aria-rowcount") == "4"
    cell = panel.locator(".map .cell")
    cell.focus()
    said = []
    for keys in ((), ("ArrowDown",), ("ArrowDown",), ("ArrowDown",)):
        for key in keys:
            page.keyboard.press(key)
        said.append(cell.get_attribute("aria-label").partition(" · ")[0])
    assert said == ["rank 0 (dp 0 tp 0)", "rank 1 (dp 0 tp 1)", "rank 2 (dp 1 tp 0)", "rank 3 (dp 1 tp 1)"]
    labels = []
    for _ in range(12):
        labels.append(cell.get_attribute("aria-label"))
        page.keyboard.press("ArrowRight")
    assert any("layers.1" in label and "born here" in label for label in labels), labels
    assert all("–" not in label and "NaN" not in label for label in labels), "every rank holds a part of every layer"
    page.keyboard.press("Enter")
    assert "rank" not in hash_of(page) or hash_of(page)["rank"] in ("", "0")
    assert hash_of(page).get("module")

"""Fragments for notebooks: the verdict or a table, bounded, escaped, without scripts."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap
from support import comparisons
from support.comparisons import comparison, row, wrong
from tensortap.core.presentation import CoverageByRank, CoverageRows
from tensortap.core.records import Coverage, HealthFinding, HealthReport, Key, Record, Summary
from tensortap.report import notebook
from tensortap.store.writer.run_writer import RunWriter

HOSTILE = '<script>alert(1)</script>"\x1b[2J'
ALLOWED = {"div", "p", "span", "b", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}


class _Reader(HTMLParser):
    """Collects text; fails on an element that is not closed, not known or carries anything but a style."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        assert {name for name, _ in attrs} <= {"style"}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def words(shown: Any) -> str:
    reader = _Reader()
    reader.feed(shown._repr_html_())
    reader.close()
    assert not reader.open
    return " | ".join(reader.words)


def stored_run(path: Path, name: str = "fc") -> Any:
    info = {"framework": "torch", "model": "Net", "modules": 2}
    zero = Summary(1, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, np.zeros(4, np.float32))
    with RunWriter(path, info=info) as writer:
        writer.append(Record(Key(3, 0, "forward", name, 0, "output", "0"), 0, 0, "Linear", "float32", (1,), 0, zero))
        writer.coverage([Coverage(name, "Linear", "seen", 2), Coverage("old", "Linear", "never called", 0, "unused")])
    return tensortap.open(path)


def test_a_divergence_shows_the_verdict_and_the_rows_around_it() -> None:
    result = comparisons.diverged()
    said = words(result)
    assert "✖ diverged" in said and result.sentence in said
    assert f"{comparisons.BORN} | output 0 | 3 | 4.1e-3" in said and "born here" in said


@pytest.mark.parametrize("scene", ["matching", "incomparable", "with_nan", "from_sketches"])
def test_every_verdict_has_its_sentence(scene: str) -> None:
    result = getattr(comparisons, scene)()
    said = words(result)
    assert result.verdict in said and result.sentence in said


def test_hostile_names_stay_text() -> None:
    rows = [row(HOSTILE), wrong(HOSTILE, birth=True, cls=HOSTILE)]
    said = words(comparison(rows, sentence=HOSTILE, notes=[HOSTILE], reference=HOSTILE))
    assert "alert(1)" in said and "\x1b" not in said


def test_long_results_give_bounded_fragments() -> None:
    name = ".".join(["layer"] * 20_000)
    result = comparison([wrong(name, birth=True)], sentence=name, notes=[name] * 1000)
    rows = CoverageRows(Coverage(f"m{at}.{name[:200]}", "Linear", "never called", 0, name) for at in range(1000))
    assert len(result._repr_html_()) < 50_000
    assert len(rows._repr_html_()) < 200_000
    assert "and 960 more" in words(rows) and "and 995 more" in words(result)


def test_a_run_shows_what_was_recorded(tmp_path: Path) -> None:
    with stored_run(tmp_path / "a") as run:
        said = words(run)
    assert "finished" in said and "Net" in said and "1 step (3), 1 rank, 1 record" in said
    assert "1 seen, 1 never called" in said


def test_coverage_shows_unseen_modules_first(tmp_path: Path) -> None:
    with stored_run(tmp_path / "a") as run:
        assert run.coverage == {
            0: [Coverage("fc", "Linear", "seen", 2), Coverage("old", "Linear", "never called", 0, "unused")]
        }
        said = words(run.coverage)
    assert said.index("old") < said.index("fc")
    assert "old | Linear | never called | 0 | unused" in said
    both = words(CoverageByRank({0: [Coverage("fc", "Linear", "seen", 1)], 1: [Coverage("fc", "Linear", "seen", 1)]}))
    assert both.startswith("1 seen | rank | module")


def test_a_tap_shows_what_it_has_written() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    with tensortap.capture(model) as tap:
        model(torch.zeros(1, 2)).sum().backward()
        tap.step()
        said = words(tap)
        assert "Tap on Linear into memory: recording, step 1" in said and "1 seen" in said
    assert "closed" in words(tap) and "1 seen" in words(tap.coverage)


def test_showing_a_tap_does_not_keep_its_coverage_from_the_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    with tensortap.capture(model, tmp_path / "a") as tap:
        model(torch.zeros(1, 2)).sum().backward()
        words(tap)
        tap.step()
        assert [row.status for row in tap.run.coverage[0]] == ["seen"]


def test_a_health_report_shows_its_findings() -> None:
    finding = HealthFinding(0, Key(2, 0, "forward", "fc", 0, "output", "0"), 0, "Linear", "nonfinite", "3 NaN")
    report = HealthReport("runs/a", "suspicious", "A NaN appears.", "", [finding], {}, _Empty())
    said = words(report)
    assert "✖ suspicious" in said and "fc | output 0 | 2 | 3 NaN" in said


class _Empty:
    num_rows = 0


def test_the_module_implements_the_contract() -> None:
    from tensortap.core.presentation import Reports, reports

    names = [name for name in vars(Reports) if name.endswith(("_html", "_comparison"))]
    assert len(names) == 6
    assert all(callable(getattr(notebook, name)) for name in names)
    assert reports() is notebook

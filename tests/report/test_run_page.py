"""The text of the page about a run, which fits the width."""

from __future__ import annotations

import math

import pytest
from reporting import facts, record, summary
from rich.cells import cell_len

from tensortap.core.records import Coverage
from tensortap.report.terminal.records_table import RecordsView, columns_of, heading, nonfinite, remainder
from tensortap.report.terminal.run import build, render

HOSTILE = ["[red]x[/red]", "a\nb", "\x1b[2J\x1b]0;title\x07", "\u202egnp.exe", "层" * 60, ":smile:", "x" * 300, "[/]"]
IDS = ["markup", "newline", "escape", "bidi", "wide", "emoji", "long", "close"]


def view(*records: object, **changes: object) -> RecordsView:
    values = {"records": records, "matching": len(records), "total": len(records), **changes}
    return RecordsView(**values)  # type: ignore[arg-type]


def page_text(width: int | None = 80, **changes: object) -> str:
    given = changes.pop("view", view(record()))
    return "\n".join(line.plain for line in render(build(facts(**changes), given), width))


def test_the_facts_name_no_machine() -> None:
    told = dict(build(facts(), view()).facts)
    assert told["model"] == "Net, 3 modules"
    assert told["ran on"] == "torch 2.5.0, Python 3.12.1, 2 × X1, Linux"
    assert told["started"] == "2025-03-01 14:05 UTC"
    assert told["captured"] == "2 steps (0, 1), 1 rank"
    assert told["records"] == "10 records of 7 distinct tensors; summaries only"
    assert told["on disk"] == "123 kB"


def test_how_much_was_kept() -> None:
    assert dict(build(facts(kept=10), view()).facts)["records"].endswith("all bytes kept")
    assert dict(build(facts(kept=1), view()).facts)["records"].endswith("bytes kept of 1 record")


def test_missing_ranks_are_counted() -> None:
    told = dict(build(facts(info={"world": 4}), view()).facts)
    assert told["captured"].endswith("1 of 4 ranks")


def test_bare_and_odd_info_is_shown() -> None:
    for info in ({}, {"environment": 3, "started": None}, {"environment": {"versions": [], "devices": [{}, 1]}}):
        assert render(build(facts(info=info), view()), 80)


def test_an_unfinished_run_shows_its_reason() -> None:
    text = page_text(finished=False, notices=["rank 0: it was not closed"])
    assert "runs/a · not finished" in text
    assert "! rank 0: it was not closed" in text


def test_coverage_groups_modules_that_were_not_fully_seen() -> None:
    rows = [Coverage("fc1", "Linear", "seen", 2), Coverage("fc2", "Linear", "seen", 2, "outputs hold no tensor")]
    rows += [Coverage(f"d{n}", "Dropout", "never called", 0, "unused") for n in range(30)]
    page = build(facts(coverage={0: rows}), view())
    assert page.counts == {"seen": 2, "never called": 30}
    assert [(g.status, g.reason, len(g.modules)) for g in page.groups] == [
        ("seen", "outputs hold no tensor", 1),
        ("never called", "unused", 30),
    ]
    text = page_text(coverage={0: rows})
    assert "d0, d1, d2" in text
    assert " more" in text
    assert "d29" not in text


def test_all_coverage_lists_every_module() -> None:
    rows = [Coverage(f"d{n}", "Dropout", "never called", 0, "unused") for n in range(30)]
    rows.append(Coverage("fc1", "Linear", "seen", 2))
    lines = [line.plain for line in render(build(facts(coverage={0: rows}), view(), all_coverage=True), 80)]
    assert all(any(f" d{n} " in line for line in lines) for n in range(30))
    assert any("fc1" in line and "2 calls" in line for line in lines)


def test_coverage_that_differs_by_rank_names_the_rank() -> None:
    seen, unseen = Coverage("fc1", "Linear", "seen", 2), Coverage("fc1", "Linear", "never called", 0, "unused")
    page = build(facts(ranks=[0, 1, 2], coverage={0: [seen], 1: [unseen], 2: [unseen]}), view())
    assert page.counts == {"seen": 1, "never called": 1}
    assert [g.ranks for g in page.groups] == [(1, 2)]
    text = page_text(ranks=[0, 1, 2], coverage={0: [seen], 1: [unseen], 2: [unseen]})
    assert "never called on ranks 1, 2: unused" in text


def test_many_groups_are_capped() -> None:
    rows = [Coverage(f"m{n}", "M", "skipped", 0, f"reason {n}") for n in range(10)]
    assert "and 4 more groups of modules: --coverage lists all" in page_text(coverage={0: rows})


def test_no_coverage_is_not_taken_for_full_coverage() -> None:
    assert "not recorded" in page_text(coverage={})


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({}, ""),
        ({"nan": 3}, "✗ 3 NaN"),
        ({"posinf": 1, "neginf": 1}, "✗ 2 Inf"),
        ({"nan": 12}, "✗ all NaN"),
        ({"nan": 2, "neginf": 1}, "✗ 2 NaN 1 Inf"),
    ],
)
def test_nonfinite_tensors_have_a_sign_and_a_word(numbers: dict[str, int], text: str) -> None:
    assert nonfinite(summary(**numbers)) == text


def titles(shown: RecordsView) -> list[str]:
    return [column.title for column in columns_of(shown)]


def test_columns_appear_if_they_have_values() -> None:
    plain = titles(view(record()))
    assert not {"step", "rank", "micro", "call", "non-finite"} & set(plain)
    assert titles(view(record(), record(1, step=1)))[0] == "step"
    assert "rank" in titles(view(record(), ranks=2))
    assert "call" in titles(view(record(), record(1, call=1)))
    assert "micro" in titles(view(record(micro=1)))
    assert titles(view(record(nan=1)))[-1] == "non-finite"


def test_the_column_to_sort_by_is_always_shown() -> None:
    long = record(module="m" * 60)
    for name in ("l1", "elements", "zeros", "min"):
        lines = render(build(facts(), view(long, sort=f"-{name}")), 80)
        assert any(name in line.plain.split() for line in lines)


def test_the_heading_has_the_count_and_the_order() -> None:
    assert heading(view()) == "no records"
    assert heading(view(record())) == "1 record, step 0, in execution order"
    assert heading(view(record(), matching=5, total=9, sort="-l2")) == (
        "1 of 5 records that match (9 in all), step 0, largest l2 first"
    )
    assert heading(view(total=9)) == "none of the 9 records matches"
    assert remainder(view(record(), matching=5, total=9)).startswith("4 more: --limit 0")
    assert remainder(view(record())) == ""


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
@pytest.mark.parametrize("name", HOSTILE, ids=IDS)
def test_any_name_is_harmless_and_fits(name: str, width: int) -> None:
    rows = [Coverage(name, name, "skipped", 1, name[:20]), Coverage(name + "2", name, "skipped", 1, name[:20])]
    given = view(record(module=name, path=name, cls=name, nan=1), record(1, step=12, kind="grad_output"), matching=99)
    for all_coverage in (False, True):
        page = build(facts(path=name, coverage={0: rows}), given, all_coverage)
        for line in render(page, width):
            assert line.plain.isprintable()
            assert cell_len(line.plain) <= width


def test_names_are_text_not_markup() -> None:
    assert "[red]x[/red]" in page_text(view=view(record(module="[red]x[/red]")))


def test_a_tensor_without_a_finite_element() -> None:
    nothing = {"min": math.nan, "max": math.nan, "mean": math.nan, "std": math.nan}
    text = page_text(view=view(record(nan=12, **nothing)))
    assert "✗ all NaN" in text
    assert "–" in text

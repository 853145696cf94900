"""Rows by module, class and depth; sorted, limited, and compared with another profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.traces import Trace
from tensortap.errors import UsageError
from tensortap.times import TimeLedger
from tensortap.times.comparison import compare_times
from tensortap.times.table import SORTS, make_table


def made(tmp_path: Path, slower: float = 0, head: str = "head (Linear)") -> TimeLedger:
    """Two blocks in a list that is never called, and a head."""
    trace = Trace()
    trace.module("forward (root) (Net)", 10, 200 + slower)
    for i, start in enumerate((20, 70)):
        trace.module(f"forward layers.{i} (Block)", start, start + 40)
        trace.module(f"forward layers.{i}.fc (Linear)", start + 10, start + 20)
        trace.module(f"forward layers.{i}.act (ReLU)", start + 25, start + 30)
    trace.module(f"forward {head}", 120, 150 + slower)
    trace.span("Optimizer.step#AdamW.step", 210 + slower, 220 + slower)
    return trace.ledger(tmp_path)


def test_depth_folds_deeper_modules(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    rows = {row.module: row for row in make_table(ledger, depth=2).rows if row.phase == "forward"}
    assert set(rows) == {"(root)", "layers.0", "layers.1", "head"}
    assert rows["layers.0"].own == rows["layers.0"].total == 40 - 8
    assert (rows["layers.0"].cls, rows["layers.0"].calls) == ("Block", 1)
    rows = {row.module: row for row in make_table(ledger, depth=1).rows if row.phase == "forward"}
    assert set(rows) == {"(root)", "layers", "head"}
    assert rows["layers"].own == 64 and (rows["layers"].cls, rows["layers"].calls) == ("", 0)
    (row,) = [row for row in make_table(ledger, depth=0).rows if row.phase == "forward"]
    assert (row.module, row.cls, row.calls) == ("(root)", "Net", 1)
    assert row.own == row.total
    for depth in (0, 1, 2, None):
        assert sum(row.own for row in make_table(ledger, depth=depth).rows) == ledger.span / 1000


def test_classes_are_summed_and_nested_ones_counted_once(tmp_path: Path) -> None:
    rows = {row.module or row.cls: row for row in make_table(made(tmp_path), by="class").rows}
    assert rows["Linear"].own == 50 and rows["Linear"].calls == 3
    assert rows["Block"].total == 64 and rows["Block"].calls == 2
    assert rows["(optimizer)"].own == 10
    trace = Trace()
    trace.module("forward (root) (Sequential)", 10, 110)
    trace.module("forward 0 (Sequential)", 30, 60)
    (row,) = [row for row in make_table(trace.ledger(tmp_path), by="class").rows if row.cls == "Sequential"]
    assert row.own == row.total == 96


@pytest.mark.parametrize("sort", SORTS)
def test_every_column_sorts_both_ways(sort: str, tmp_path: Path) -> None:
    ledger = made(tmp_path)
    rows = make_table(ledger, sort=sort).rows
    assert set(rows) == set(make_table(ledger, sort=f"-{sort}").rows)
    if sort in ("module", "class", "phase"):
        values = [getattr(row, "cls" if sort == "class" else sort) for row in rows]
        assert values == sorted(values)
    elif sort == "order":
        assert rows[0].module == "(root)" and make_table(ledger, sort="-order").rows[-1].module == "(root)"
    else:
        values = [getattr(row, sort) for row in rows]
        assert values == sorted(values, reverse=True)


def test_the_rest_is_reported_if_rows_are_left_out(tmp_path: Path) -> None:
    ledger = made(tmp_path)
    whole, cut = make_table(ledger, top=0), make_table(ledger, top=3)
    assert cut.rows == whole.rows[:3] and cut.left_out == len(whole.rows) - 3
    assert cut.rest == pytest.approx(sum(row.own for row in whole.rows[3:]))
    assert sum(row.own_share for row in whole.rows) == pytest.approx(1)


@pytest.mark.parametrize("wrong", [{"by": "layer"}, {"depth": -1}, {"top": -2}, {"sort": "size"}])
def test_wrong_arguments(wrong: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        make_table(made(tmp_path), **wrong)


def test_averages_per_step(tmp_path: Path) -> None:
    trace = Trace()
    for start in (10, 60, 110, 160):
        trace.module("forward (root) (Net)", start, start + 20)
    ledger = trace.ledger(tmp_path).per_step()
    (row,) = [row for row in make_table(ledger).rows if row.module == "(root)"]
    assert (ledger.steps, row.own, row.calls) == (4, 20, 4)
    assert sum(row.own for row in make_table(ledger).rows) == pytest.approx(ledger.span / 1000)


def test_two_profiles_by_difference(tmp_path: Path) -> None:
    facts = compare_times(made(tmp_path, slower=25), made(tmp_path))
    first = facts["rows"][0]
    assert (first["module"], first["phase"]) == ("head", "forward")
    assert (first["cpu_own"], first["cpu_own_reference"]) == (55, 30)
    assert (first["cpu_own_difference"], first["cpu_own_ratio"]) == (25, pytest.approx(55 / 30))
    assert all(row["cpu_own_difference"] == 0 for row in facts["rows"][1:])
    mirrored = compare_times(made(tmp_path), made(tmp_path, slower=25))
    assert mirrored["rows"][0]["module"] == "head" and mirrored["rows"][0]["cpu_own_difference"] == -25
    by_total = compare_times(made(tmp_path, slower=25), made(tmp_path), sort="total")
    assert {row["module"] for row in by_total["rows"][:2]} == {"head", "(root)"}


def test_a_module_of_another_class_is_still_the_same_module(tmp_path: Path) -> None:
    facts = compare_times(made(tmp_path, head="head (QuantLinear)"), made(tmp_path))
    (row,) = [row for row in facts["rows"] if row["module"] == "head"]
    assert (row["class"], row["cpu_own_difference"]) == ("QuantLinear", 0)


def test_a_row_that_only_one_side_has(tmp_path: Path) -> None:
    facts = compare_times(made(tmp_path, head="extra (Linear)"), made(tmp_path))
    rows = {row["module"]: row for row in facts["rows"]}
    assert rows["extra"]["cpu_own_ratio"] is None and rows["extra"]["cpu_own_difference"] == 30
    assert rows["head"]["cpu_own_ratio"] == 0 and rows["head"]["cpu_own_difference"] == -30
    with pytest.raises(UsageError, match="by which two profiles can be compared"):
        compare_times(made(tmp_path), made(tmp_path), sort="calls")

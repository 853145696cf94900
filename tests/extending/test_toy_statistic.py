"""A statistic that is added from outside the package, through `core.statistics` alone, appears wherever others do."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import tensortap as tt
from support.read_page import ReadPage
from tensortap.cli import main
from tensortap.cli.gather import facts_of
from tensortap.core import statistics
from tensortap.core.placement import Placement
from tensortap.core.records import Statistics, Summary
from tensortap.core.statistics import Display, Statistic, register
from tensortap.errors import RunUnreadable, UsageError
from tensortap.health import health as examine
from tensortap.kernels import summarize
from tensortap.kernels.summary import reference
from tensortap.report.files import comparison_csv, comparison_json
from tensortap.report.html import comparison as comparison_page
from tensortap.report.html import run as run_page
from tensortap.store.format import SCHEMA

NAME = "negatives"


def count_negatives(values: Any) -> float:
    return float((values < 0).sum())


def negatives(**changes: Any) -> Statistic:
    given: dict[str, Any] = {
        "name": NAME,
        "dtype": "int64",
        "about": "number of elements below zero",
        "unit": "elements",
        "merge": "sum",
        "show": Display("negative", "count"),
        "compute": count_negatives,
    }
    return Statistic(**{**given, **changes})


@pytest.fixture
def registered() -> Iterator[Statistic]:
    with register(negatives()) as statistic:
        yield statistic


def train(path: Path | None, keep: str = "summary", scale: float = 1.0) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    with torch.no_grad():
        model[2].weight *= scale
    with tt.capture(model, path, keep=keep) as tap:
        model(torch.randn(4, 6)).square().sum().backward()
        tap.step()


@pytest.fixture
def runs(registered: Statistic, tmp_path: Path) -> tuple[Path, Path]:
    train(tmp_path / "a", keep="tensors")
    train(tmp_path / "b", keep="tensors", scale=-1.0)
    return tmp_path / "a", tmp_path / "b"


def truth(run: Any) -> list[int]:
    return [int((run.load(record) < 0).sum()) for record in run]


def show(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    before, sys.argv = sys.argv, ["tensortap", "show", *map(str, words)]
    try:
        with pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = before
    assert not end.value.code
    return capsys.readouterr().out


def index_on_disk(run: Path) -> Any:
    return pa.ipc.open_stream((run / "rank_0" / "index.arrows").read_bytes()).read_all()


# --- kernels -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool", "complex64"])
@pytest.mark.parametrize("size", [0, 1, 5000, (1 << 20) + 3])
def test_both_kernels_compute_it(registered: Statistic, dtype: str, size: int) -> None:
    array = (np.random.default_rng(0).standard_normal(size) * 9).astype(dtype)
    parts = array.view(np.float32) if dtype == "complex64" else array
    for found in (summarize(array), reference.summarize(array)):
        assert found[NAME] == found.more[NAME] == int((parts < 0).sum())
        assert found["zeros"] == found.zeros


def test_parts_merge(registered: Statistic) -> None:
    array = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    parts = [
        reference.summarize(array[:3], Placement.of_block((7, 5), (0, 0), (3, 5))),
        reference.summarize(array[3:], Placement.of_block((7, 5), (3, 0), (4, 5))),
    ]
    merged, whole = reference.merge(parts), reference.summarize(array)
    assert merged[NAME] == whole[NAME] == int((array < 0).sum())
    assert merged.digest == whole.digest


@pytest.mark.parametrize(
    ("merge", "compute", "expected"),
    [
        ("least", np.min, -3.0),
        ("greatest", np.max, 4.0),
        ("norm", lambda x: float(np.sqrt((x * x).sum())), 5.0),
        (lambda values: sorted(values)[-1], np.max, 4.0),
    ],
)
def test_merge_rules(merge: Any, compute: Any, expected: float) -> None:
    with register(negatives(dtype="float64", merge=merge, compute=compute)):
        parts = [
            reference.summarize(np.array([x]), Placement.of_block((2,), (at,), (1,)))
            for at, x in enumerate((-3.0, 4.0))
        ]
        assert reference.merge(parts)[NAME] == expected


def test_an_unknown_part_makes_the_whole_unknown(registered: Statistic) -> None:
    whole = summarize(np.array([-1.0]))
    lacking = Summary(**{each.name: getattr(whole, each.name) for each in fields(Summary) if each.name != "more"})
    assert lacking[NAME] is None
    assert reference.merge([whole, lacking])[NAME] is None


# --- store ---------------------------------------------------------------------------------------------------------
def test_a_captured_run_has_it(runs: tuple[Path, Path]) -> None:
    run = tt.open(runs[0])
    assert [record.summary[NAME] for record in run] == truth(run)
    assert max(truth(run)) > 0
    table = index_on_disk(runs[0])
    assert table.schema.names == [*SCHEMA.names, NAME]
    assert table.schema.field(NAME).metadata == {b"about": b"number of elements below zero"}
    assert table.column(NAME).to_pylist() == run.to_arrow().column(NAME).to_pylist() == truth(run)


def test_a_run_in_memory_has_it(registered: Statistic) -> None:
    model = torch.nn.Linear(3, 2)
    with tt.capture(model, keep="tensors") as tap:
        model(torch.randn(4, 3)).sum().backward()
        tap.step()
    assert tap.run.to_arrow().column(NAME).to_pylist() == truth(tap.run)


def test_without_the_registration_the_run_reads_as_usual(tmp_path: Path) -> None:
    with register(negatives()):
        train(tmp_path / "with")
    train(tmp_path / "without")
    extended, plain = tt.open(tmp_path / "with"), tt.open(tmp_path / "without")
    assert index_on_disk(tmp_path / "without").schema.equals(SCHEMA, check_metadata=True)
    assert extended.to_arrow().schema.equals(plain.to_arrow().schema)
    assert [r.summary.digest for r in extended] == [r.summary.digest for r in plain]
    assert all(not r.summary.more for r in extended)
    assert any("not registered here" in notice and NAME in notice for notice in extended.notices)
    assert not plain.notices
    assert tt.compare(tmp_path / "with", tmp_path / "without").verdict == "match"


def test_a_run_that_lacks_it_has_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "without")
    with register(negatives()):
        train(tmp_path / "with")
        run = tt.open(tmp_path / "without")
        assert set(run.to_arrow().column(NAME).to_pylist()) == {None}
        assert {record.summary[NAME] for record in run} == {None}
        table = tt.compare(tmp_path / "without", tmp_path / "with").table
        assert set(table.column(f"{NAME}_reference").to_pylist()) == {None}
        assert None not in table.column(f"{NAME}_candidate").to_pylist()
        assert NAME in show(capsys, tmp_path / "without", "--sort", NAME)


def test_a_process_without_it_reads_the_run(tmp_path: Path) -> None:
    with register(negatives()):
        train(tmp_path / "with")
    script = (
        "import sys, tensortap; run = tensortap.open(sys.argv[1]); print(len(list(run)), run.to_arrow().num_columns)"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "with")], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == [str(len(tt.open(tmp_path / "with"))), str(len(SCHEMA) + 1)]


def test_another_extra_column_is_damage(tmp_path: Path) -> None:
    train(tmp_path / "a")
    file = tmp_path / "a" / "rank_0" / "index.arrows"
    table = index_on_disk(tmp_path / "a")
    table = table.append_column("more_text", pa.array(["x"] * table.num_rows))
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(RunUnreadable, match="its columns are not those of an index"):
        tt.open(tmp_path / "a").to_arrow()


def test_a_tap_keeps_the_columns_that_it_began_with(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with tt.capture(model, tmp_path / "a") as tap:
        with register(negatives()):
            model(torch.randn(4, 3)).sum().backward()
        tap.step()
    assert index_on_disk(tmp_path / "a").schema.equals(SCHEMA)
    assert len(tt.open(tmp_path / "a")) > 0


def test_a_run_that_was_opened_before_the_registration_has_null(tmp_path: Path) -> None:
    train(tmp_path / "a")
    with tt.open(tmp_path / "a") as run:
        assert NAME not in run.to_arrow().column_names
        with register(negatives()):
            table = tt.compare(run, run).table
    assert set(table.column(f"{NAME}_reference").to_pylist()) == {None}


# --- compare and report --------------------------------------------------------------------------------------------
def test_comparison_csv_and_json_have_both_sides(runs: tuple[Path, Path]) -> None:
    comparison = tt.compare(*runs)
    assert comparison.verdict == "diverged"
    expected = {
        side: {(r.key.module, r.key.kind, r.key.path, r.key.call): r.summary[NAME] for r in tt.open(path)}
        for side, path in zip(("reference", "candidate"), runs, strict=True)
    }
    written = io.BytesIO()
    comparison_csv.write(comparison, written)
    from_csv = list(csv.DictReader(io.StringIO(written.getvalue().decode())))
    from_json = json.loads("".join(comparison_json.text(comparison)))["rows"]
    assert len(from_csv) == len(from_json) == len(comparison) > 0
    for row, line, item in zip(comparison.rows, from_csv, from_json, strict=True):
        for side in ("reference", "candidate"):
            known = expected[side][row["module"], row["kind"], row["path"], row["call"]]
            assert row[f"{NAME}_{side}"] == int(line[f"{NAME}_{side}"]) == item[f"{NAME}_{side}"] == known


def test_show_has_a_column(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(capsys, runs[0], "--kind", "output", "--sort", f"-{NAME}").splitlines()
    head = next(line for line in lines if "module" in line and "shape" in line)
    assert NAME in head.split()
    objects = json.loads(show(capsys, runs[0], "--json"))["records"]
    assert [each[NAME] for each in objects] == truth(tt.open(runs[0]))


def test_the_page_of_a_comparison_has_both_sides(runs: tuple[Path, Path]) -> None:
    comparison = tt.compare(*runs, details=3)
    page = ReadPage("".join(comparison_page.page(comparison).parts()))
    for side in ("reference", "candidate"):
        expected = comparison.table.column(f"{NAME}_{side}").to_pylist()
        assert page.column(f"{NAME}_{side}").tolist() == expected
    listed = {each["name"]: each for each in page.head["statistics"]}
    assert listed[NAME] == {"name": NAME, "label": "negative", "form": "count", "added": True}
    assert not listed["mean"]["added"]
    assert {"term": "negative", "text": "Number of elements below zero."} in page.head["definitions"]
    detail = page.json(next(iter(page.head["details"].values())))
    assert isinstance(detail["sides"]["reference"][NAME], int)


def test_the_page_of_a_run_has_a_column(runs: tuple[Path, Path]) -> None:
    run = tt.open(runs[0])
    page = ReadPage("".join(run_page.page(facts_of(run), examine(run)).parts()))
    assert page.column(NAME).tolist() == truth(run)


# --- the table -----------------------------------------------------------------------------------------------------
def test_the_table_is_that_of_the_fields_and_columns() -> None:
    stored = [each.name for each in statistics.STORED]
    assert [each.name for each in fields(Statistics)] == [*stored, "more"]
    assert [name for name in SCHEMA.names if name in stored] == stored
    for each in statistics.listed():
        assert each.about and each.sentence.endswith(".")
        assert (each.merge is None) == (each.derive is not None)


def test_derived_statistics_match_their_definition() -> None:
    array = np.array([3.0, -4.0, np.inf, np.nan, 0.0], np.float32)
    found = {each.name: each.derive(summarize(array).__getitem__) for each in statistics.DERIVED if each.derive}
    assert (found["inf"], found["nonfinite"], found["absmax"]) == (1, 2, 4.0)
    assert math.isclose(found["rms"], (25 / 3) ** 0.5)
    assert math.isclose(found["var"], float(np.var(array[np.isfinite(array)])), rel_tol=1e-6)


# An entry of DERIVED is all that a derived statistic takes, whichever statistics its formula reads.
ONE_ENTRY = """
import sys
import numpy as np
import tensortap.core.statistics as statistics
from tensortap.core.statistics import Display, Statistic

show = Display("mean abs", terminal=(10, 11), page=True, sides=7)
entry = Statistic("meanabs", "float64", "mean magnitude", show=show, derive=lambda get: get("l1") / get("elements"))
statistics.DERIVED = (*statistics.DERIVED, entry)
statistics._FORMULAS["meanabs"] = entry.derive
import tensortap

a, b = (tensortap.open(path) for path in sys.argv[1:])
result = tensortap.compare(a, b)
for side, run in (("reference", a), ("candidate", b)):
    expected = [record.summary.l1 / record.summary.elements for record in run.records()]
    assert np.allclose(result.table.column(f"meanabs_{side}").to_numpy(), expected)
result.save(f"{sys.argv[2]}.html")
result.save(f"{sys.argv[2]}.csv")
from tensortap.cli import main
sys.argv[1:] = ["show", sys.argv[1], "--sort", "meanabs"]
main()
"""


def test_a_derived_statistic_is_one_entry(tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("b", 2.0)):
        train(tmp_path / name, scale=scale)
    command = [sys.executable, "-c", ONE_ENTRY, str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert "meanabs" in done.stdout
    assert "meanabs_candidate" in (tmp_path / "b.csv").read_text().partition("\n")[0]
    page = ReadPage((tmp_path / "b.html").read_text())
    assert {"meanabs_reference", "meanabs_candidate"} <= {each["name"] for each in page.head["columns"]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "mean"}, "taken"),
        ({"name": "absmax"}, "taken"),
        ({"name": "module"}, "taken"),
        ({"name": "no name"}, "identifier"),
        ({"dtype": "uint64"}, "int64 or float64"),
        ({"compute": None}, "compute"),
        ({"merge": "pooled"}, "merge must be"),
        ({"merge": "wrap"}, "merge must be"),
        ({"merge": None}, "merge must be"),
    ],
)
def test_invalid_statistics_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        register(negatives(**changes))
    assert not statistics.added()


def test_a_name_is_registered_once(registered: Statistic) -> None:
    with pytest.raises(UsageError, match="taken"):
        register(negatives())
    assert statistics.added() == (registered,)


def test_undo_leaves_nothing() -> None:
    registration = register(negatives())
    registration.undo()
    registration.undo()
    assert not statistics.added()
    assert summarize(np.ones(3)).more == {}

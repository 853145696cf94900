"""The formats for programs, each read back by a parser that knows nothing of tensortap."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet
import pytest

from support import comparisons
from support.comparisons import BORN, comparison, equal, row, wrong
from tensortap.compare.say.columns import SCHEMA
from tensortap.core.csv_cells import unguarded
from tensortap.core.records import Key, Unmatched
from tensortap.report.files import comparison_csv, comparison_json, comparison_junit, comparison_parquet

SCENES = ("diverged", "from_sketches", "with_nan", "matching", "incomparable")
HOSTILE = ['a"b', "a,b;c", "a\nb", "<a>&amp;]]>", "\x00\x1b[2J", "层\u202e", "'\\", "\ufffe\uffff", "=1+1", ""]


def written(report: Any, result: Any) -> bytes:
    file = io.BytesIO()
    report.write(result, file)
    return file.getvalue()


def strict(data: bytes) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(data.decode("ascii"), parse_constant=refuse)


def hostile(name: str) -> Any:
    key = Key(3, 0, "forward", name, 0, "output", name)
    rows = [row(name, path=name), wrong(name, path="1" + name, birth=True, cls=name, rule=name, container=name)]
    return comparison(
        rows, sentence=name, notes=[name], policy=name, unmatched=[Unmatched("candidate", key, 0, name)], reference=name
    )


# --- CSV -----------------------------------------------------------------------------------------------------------
def test_csv_has_every_column_and_row() -> None:
    result = comparisons.diverged()
    rows = list(csv.DictReader(io.StringIO(written(comparison_csv, result).decode())))
    assert list(rows[0]) == SCHEMA.names
    assert len(rows) == len(result)
    born = next(each for each in rows if each["birth"] == "true")
    assert (born["module"], born["kind"], born["status"]) == (BORN, "output", "diverged")
    assert float(born["rel_l2"]) == 4.1e-3
    assert (born["max_abs_index"], born["shape_reference"]) == ("0;3;17", "2;16;64")


def test_csv_distinguishes_unknown_from_nan() -> None:
    result = comparison([row("a", rel_l2=None, mean_candidate=math.nan, max_abs=math.inf, shape_reference=[])])
    (only,) = csv.DictReader(io.StringIO(written(comparison_csv, result).decode()))
    assert only["rel_l2"] == ""
    assert math.isnan(float(only["mean_candidate"]))
    assert float(only["max_abs"]) == math.inf
    assert only["shape_reference"] == ""


def test_csv_of_nothing_is_a_header() -> None:
    text = written(comparison_csv, comparison([])).decode()
    assert next(csv.reader(io.StringIO(text))) == SCHEMA.names


@pytest.mark.parametrize("name", HOSTILE)
def test_csv_keeps_hostile_names(name: str) -> None:
    if "\0" in name and sys.version_info < (3, 11):
        pytest.skip("csv reads no NUL before Python 3.11")
    rows = list(csv.DictReader(io.StringIO(written(comparison_csv, hostile(name)).decode(), newline="")))
    assert [unguarded(each["module"]) for each in rows] == [name, name]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\x1b=1", "＝1", "'=1"])
def test_csv_has_no_cell_that_a_spreadsheet_runs(name: str) -> None:
    result = comparison([wrong(name, path=name, cls=name, rule=name, container=name, mean_candidate=-1.5, birth=True)])
    (only,) = csv.DictReader(io.StringIO(written(comparison_csv, result).decode(), newline=""))
    assert only["mean_candidate"] == "-1.5"  # a number stays one
    texts = [only[column] for column in ("module", "path", "cls", "rule", "container")]
    assert texts == [f"'{name}"] * 5
    assert [unguarded(cell) for cell in texts] == [name] * 5


# --- JSON ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scene", SCENES)
def test_json_follows_its_schema(scene: str) -> None:
    result = getattr(comparisons, scene)()
    said = strict(written(comparison_json, result))
    assert (said["format"], said["schema"]) == ("tensortap-compare", 1)
    names = ("reference", "candidate", "verdict", "sentence", "policy")
    assert all(said[name] == getattr(result, name) for name in names)
    assert said["notes"] == list(result.notes)
    assert said["counts"] == result.counts
    assert len(said["births"]) == len(result.births)
    assert len(said["unmatched"]) == len(result.unmatched)
    assert len(said["rows"]) == len(result)
    assert all(list(each) == SCHEMA.names for each in said["rows"])
    documented = comparison_json.__doc__ or ""
    assert all(f"{key} " in documented or f"{key}," in documented for key in said)
    for key in said["first"] or ():
        assert key in documented


def test_json_first_is_the_record_with_its_container() -> None:
    first = strict(written(comparison_json, comparisons.with_nan()))["first"]
    assert (first["module"], first["container"]) == (BORN, "layers.7.self_attn")
    first = strict(written(comparison_json, comparisons.diverged()))["first"]
    assert first["container"] is None
    assert first["max_abs_index"] == [0, 3, 17]
    assert first["inputs_matched"] is True
    assert tuple(first[name] for name in Key._fields) == (3, 0, "forward", BORN, 0, "output", "0")


def test_json_writes_null_for_nan_and_infinities() -> None:
    result = comparison([wrong("a", mean_candidate=math.nan, max_abs=math.inf, birth=True), row("b", rel_l2=None)])
    object.__setattr__(result, "info", {"reference": {"x": math.nan, 3: [math.inf, (1, object)]}})
    said = strict(written(comparison_json, result))
    assert said["rows"][0]["mean_candidate"] is None
    assert said["rows"][0]["max_abs"] is None
    assert said["first"]["max_abs"] is None
    assert said["rows"][1]["rel_l2"] is None
    assert said["info"]["reference"]["x"] is None


@pytest.mark.parametrize("name", [*HOSTILE, "\udc80"])
def test_json_keeps_hostile_names(name: str) -> None:
    if name != "\udc80":
        said = strict(written(comparison_json, hostile(name)))
        assert said["rows"][0]["module"] == name
        assert said["first"]["module"] == name
        assert said["unmatched"][0]["path"] == name
    assert strict(written(comparison_json, comparison([], reference=name)))["reference"] == name


def test_json_of_many_rows_comes_in_pieces() -> None:
    result = comparisons.large(5000)
    pieces = list(comparison_json.text(result))
    assert max(map(len, pieces)) < 10_000
    assert len(json.loads("".join(pieces))["rows"]) == 5000


# --- Parquet -------------------------------------------------------------------------------------------------------
def test_parquet_holds_the_table_and_the_verdict() -> None:
    result = comparisons.diverged()
    table = pyarrow.parquet.read_table(io.BytesIO(written(comparison_parquet, result)))
    assert table.equals(result.table.cast(table.schema))
    assert pa.types.is_string(table.schema.field("module").type)
    assert table.schema.metadata[b"tensortap.sentence"].decode() == result.sentence
    assert table.schema.metadata[b"tensortap.verdict"] == b"diverged"


# --- JUnit ---------------------------------------------------------------------------------------------------------
def suite(result: Any) -> Any:
    root = ElementTree.fromstring(written(comparison_junit, result))
    assert root.tag == "testsuites"
    (found,) = root
    return found


def test_junit_has_one_case_a_module() -> None:
    result = comparisons.diverged()
    found = suite(result)
    cases = found.findall("testcase")
    modules = set(result.table.column("module").to_pylist())
    assert {case.get("name") for case in cases} == {name or "(root)" for name in modules}
    assert len(cases) == len(modules) == int(found.get("tests"))
    assert int(found.get("failures")) == len(found.findall("testcase/failure"))


def test_junit_explains_a_failure() -> None:
    found = suite(comparisons.diverged())
    (failure,) = (case.find("failure") for case in found.findall("testcase") if case.get("name") == BORN)
    assert failure.get("message") == f"{BORN}: 2 of 3 pairs failed, born here"
    assert failure.text.splitlines() == [
        f"{BORN} · output 0 · forward · step 3 · rank 0",
        "Mismatched elements: 129 / 2,048 (6.3%)",
        "Greatest absolute difference: 0.01230 at index (0, 3, 17) (1.262 instead of 1.25)",
        "Relative error: 4.1e-3 (up to 1.6e-5 allowed: float32, depth 9)",
    ]


def test_junit_skips_unjudged_modules() -> None:
    only = Unmatched("candidate", Key(0, 0, "forward", "extra", 0, "output", "0"), 0, "Linear")
    rows = [row("a", status="unjudged"), equal("b"), row("b", status="unjudged")]
    found = suite(comparison(rows, unmatched=[only]))
    skipped = {
        case.get("name"): case.find("skipped").get("message") for case in found if case.find("skipped") is not None
    }
    assert skipped == {"a": "no pair could be judged", "extra": "only the candidate has this module"}
    assert (found.get("tests"), found.get("skipped"), found.get("failures")) == ("3", "2", "0")


def test_junit_of_runs_with_nothing_in_common_fails() -> None:
    found = suite(comparisons.incomparable())
    assert found.get("errors") == "1"
    assert found.find("testcase/error").get("message").startswith("Too little in common")


@pytest.mark.parametrize("name", [*HOSTILE, "\udc80"])
def test_junit_is_valid_whatever_the_names(name: str) -> None:
    result = hostile(name) if name != "\udc80" else comparison([], reference=name, sentence=name)
    assert suite(result) is not None


def test_junit_of_many_rows_stays_small() -> None:
    result = comparisons.large(20_000, births=[])
    assert len(suite(result).findall("testcase")) == 1000
    assert len(written(comparison_junit, result)) < 600_000

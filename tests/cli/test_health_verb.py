"""`tensortap health`: a single run on the terminal, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from showing import call, record, write

import tensortap as tt
from tensortap.store import RunWriter

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def suspicious(tmp_path: Path) -> Path:
    write(tmp_path / "a")
    return tmp_path / "a"


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    with RunWriter(tmp_path / "b", rank=0, world=1, info={}) as writer:
        writer.append(record(1, "fc", 0, "output"))
    return tmp_path / "b"


def test_a_finding_ends_with_1(capsys: Capsys, suspicious: Path) -> None:
    ended = call(capsys, "health", suspicious)
    assert (ended.code, ended.err) == (1, "")
    assert ended.out.startswith("✖ NaN or Inf is born in output 0 of layers.0.fc2 (Linear) in step 1")
    assert "1  layers.0.fc2  output 0  nonfinite  has 2 NaN and 0 Inf among 12 elements" in ended.out
    assert str(suspicious) in ended.out.replace("\n", "").replace(" ", "")


def test_a_healthy_run_ends_with_0(capsys: Capsys, healthy: Path) -> None:
    ended = call(capsys, "health", healthy)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("✔ Nothing is suspicious")
    assert "records    1: 1 ok" in ended.out


def test_records_may_be_chosen(capsys: Capsys, suspicious: Path) -> None:
    assert call(capsys, "health", suspicious, "--kind", "grad_output", "--module", "layers.1.*").code == 0
    assert call(capsys, "health", suspicious, "--step", 0, "--kind", "output", "--module", "layers.0.fc2").code == 0
    assert call(capsys, "health", suspicious, "--step", "1", "--module", "layers.0.fc2").code == 1


def test_nothing_to_examine_ends_with_3(capsys: Capsys, suspicious: Path) -> None:
    ended = call(capsys, "health", suspicious, "--module", "nowhere")
    assert ended.code == 3
    assert ended.out.startswith("∅ There is nothing to examine")


@pytest.mark.parametrize("options", [(), ("--json", "-")])
def test_unreadable_input_ends_with_2(capsys: Capsys, tmp_path: Path, options: tuple[str, ...]) -> None:
    ended = call(capsys, "health", tmp_path / "gone", *options)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert call(capsys, "health", tmp_path / "gone", "--step", "3:4").code == 2


def test_json(capsys: Capsys, suspicious: Path, tmp_path: Path) -> None:
    ended = call(capsys, "health", suspicious, "--json", "-")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    found = json.loads(ended.out)
    report = tt.health(suspicious)
    assert (found["format"], found["verdict"], found["sentence"]) == ("tensortap-health", "suspicious", str(report))
    assert found["counts"] == dict(report.counts) and found["records"] == len(report) == 16
    (finding,) = (each for each in found["findings"] if each["status"] == "nonfinite")
    assert (finding["module"], finding["step"], finding["kind"]) == ("layers.0.fc2", 1, "output")
    assert finding["row"] == next(birth.row for birth in report.births if birth.status == "nonfinite")
    file = tmp_path / "health.json"
    assert call(capsys, "health", suspicious, "-q", "--json", file).out == ""
    assert json.loads(file.read_text()) == found


def test_it_prints_what_the_page_shows(capsys: Capsys, suspicious: Path, tmp_path: Path) -> None:
    page = call(capsys, "report", suspicious, "-o", tmp_path / "page.html")
    assert page.out.splitlines()[0] == str(tt.health(suspicious))


def test_many_findings_are_cut(capsys: Capsys, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "c", rank=0, world=1, info={}) as writer:
        for seq in range(40):
            writer.append(record(seq, f"fc{seq}", 0, "output", nan=1))
    short, long = (call(capsys, "health", tmp_path / "c", *options).out for options in ((), ("-v",)))
    assert "25 more findings: -v shows all" in short
    assert "more findings" not in long and "fc39" in long

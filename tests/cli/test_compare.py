"""`tensortap compare`: what it asks for, what it writes, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow.parquet
import pytest
import torch
from showing import CommandResult, call

import tensortap as tt
from support import comparisons
from tensortap.cli.pairing import parse_steps
from tensortap.errors import RunNotFound, UsageError

Capsys = pytest.CaptureFixture[str]


class Asked:
    """Replaces `tt.compare`, and records its arguments."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.calls = 0

    def __call__(self, reference: str, candidate: str, **options: Any) -> Any:
        self.calls += 1
        self.options = {"reference": reference, "candidate": candidate, **options}
        if reference == "gone":
            raise RunNotFound(f"{reference} is no run")
        return getattr(comparisons, reference)()


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    function = Asked()
    monkeypatch.setattr(tt, "compare", function, raising=False)
    return function


def compare(capsys: Capsys, *args: object) -> CommandResult:
    return call(capsys, "compare", *args)


# --- what it asks for ----------------------------------------------------------------------------------------------
def test_without_options_everything_is_left_to_compare(capsys: Capsys, asked: Asked) -> None:
    compare(capsys, "matching", "b")
    none = ("mapping", "steps", "ranks", "modules", "rtol", "atol", "kinds", "truth", "workers", "engine", "address")
    nothing = dict.fromkeys((*none, "zoom", "progress"))
    asked_for = {"reference": "matching", "candidate": "b", "rename": (), "noise": ()}
    assert asked.options == {**asked_for, "until_first": False, "device": "cpu", "details": 0, **nothing}


def test_options_reach_compare(capsys: Capsys, asked: Asked) -> None:
    ended = compare(
        *(capsys, "matching", "b", "--rename", "(?=a)b=c", "--rename", "x=", "--map", "rules.toml", "--step", "0,3:4"),
        *("--rank", 0, "--rank", 2, "--module", "layers.*", "--module", "(root)", "--kind", "output", "--rtol", "1e-3"),
        *("--atol", 0, "--noise", "a2", "--noise", "a3", "--until-first", "--workers", 3, "--device", "cuda"),
        *("--truth", "exact", "--engine", "ray", "--address", "auto", "--zoom", "a.py:f,b.py:g"),
    )
    assert ended.code == 0
    assert asked.options == {
        "reference": "matching",
        "candidate": "b",
        "rename": ("(?=a)b=c", "x="),
        "mapping": "rules.toml",
        "steps": {0: 0, 3: 4},
        "ranks": [0, 2],
        "modules": ["layers.*", ""],
        "kinds": ("output",),
        "rtol": 1e-3,
        "atol": 0.0,
        "noise": ("a2", "a3"),
        "truth": "exact",
        "zoom": ("a.py:f", "b.py:g"),
        "until_first": True,
        "details": 0,
        "workers": 3,
        "device": "cuda",
        "engine": "ray",
        "address": "auto",
        "progress": None,
    }


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("3", {3: 3}),
        ("0,5", {0: 0, 5: 5}),
        ("10-12", {10: 10, 11: 11, 12: 12}),
        ("3:4", {3: 4}),
        ("0-1:100-101, 7", {0: 100, 1: 101, 7: 7}),
    ],
)
def test_steps(text: str, meant: dict[int, int]) -> None:
    assert parse_steps(text) == meant


@pytest.mark.parametrize("text", ["x", "", "3-", "-3", "5-3", "3:", ":3", "0-3:7", "1,,2", "0-99999999", "3:4:5", "½"])
def test_steps_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(UsageError, match="--step"):
        parse_steps(text)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--step", "x"], "--step x: 'x' is not a step"),
        (["--kind", "outptu"], "did you mean output?"),
        (["--rtol", "-1"], "--rtol -1.0: give zero or more"),
        (["--atol", "nan"], "--atol nan"),
        (["--workers", "0"], "at least one"),
        (["--json", "-", "--csv", "-"], "--csv and --json cannot both go to stdout"),
        (["--json", "x", "--junit", "x"], "--json and --junit cannot both go to x"),
        (["--json", "no/such/folder/x"], "there is no folder"),
        (["--json", "."], "it is a folder"),
    ],
)
def test_wrong_usage_is_reported_before_any_work(capsys: Capsys, asked: Asked, options: list[str], hint: str) -> None:
    ended = compare(capsys, "diverged", "b", *options)
    assert (ended.code, ended.out, asked.calls) == (2, "", 0)
    assert hint in ended.err
    assert len(ended.err.splitlines()) == 1


# --- how it ends ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("scene", "code"), [("matching", 0), ("diverged", 1), ("with_nan", 1), ("gone", 2), ("incomparable", 3)]
)
def test_exit_codes(capsys: Capsys, scene: str, code: int) -> None:
    assert compare(capsys, scene, "b").code == code
    assert compare(capsys, scene, "b", "--exit-zero").code == (2 if code == 2 else 0)
    quiet = compare(capsys, scene, "b", "--quiet")
    assert (quiet.code, quiet.out) == (code, "")


def test_the_page(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = compare(capsys, "diverged", "b")
    golden = Path(__file__).parents[1] / "report" / "golden" / "diverged.txt"
    assert ended.out == golden.read_text(encoding="utf-8")
    assert ended.err == ""


def test_verbose(capsys: Capsys) -> None:
    lines = [len(compare(capsys, "diverged", "b", *more).out.splitlines()) for more in ([], ["-v"], ["-vv"])]
    assert lines[0] < 24 < 100 < lines[1] < 372 < lines[2]


# --- what it writes ------------------------------------------------------------------------------------------------
def test_every_format_into_a_file(capsys: Capsys, tmp_path: Path) -> None:
    names = ("csv", "json", "junit", "markdown", "parquet")
    options = [word for name in names for word in (f"--{name}", tmp_path / name)]
    ended = compare(capsys, "diverged", "b", *options)
    assert ended.code == 1
    assert "born here" in ended.out
    assert len(list(csv.DictReader(io.StringIO((tmp_path / "csv").read_text())))) == 372
    assert json.loads((tmp_path / "json").read_text())["verdict"] == "diverged"
    assert ElementTree.parse(tmp_path / "junit").getroot().tag == "testsuites"
    assert (tmp_path / "markdown").read_text(encoding="utf-8").startswith("### ❌")
    assert pyarrow.parquet.read_table(tmp_path / "parquet").num_rows == 372
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_stdout_is_for_the_format_alone(capsys: Capsys) -> None:
    ended = compare(capsys, "diverged", "b", "--json", "-")
    assert (ended.code, json.loads(ended.out)["verdict"]) == (1, "diverged")
    assert ended.err == f"{comparisons.SENTENCE}\n"
    assert len(list(csv.DictReader(io.StringIO(compare(capsys, "diverged", "b", "--csv", "-").out)))) == 372
    assert ElementTree.fromstring(compare(capsys, "diverged", "b", "--junit", "-").out.encode()).tag == "testsuites"
    assert compare(capsys, "diverged", "b", "--markdown", "-", "-q").err == ""


def test_parquet_to_stdout(capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    ended = call(capfdbinary, "compare", "diverged", "b", "--parquet", "-")  # type: ignore[arg-type]
    assert pyarrow.parquet.read_table(io.BytesIO(ended.out)).num_rows == 372  # type: ignore[arg-type]


def test_a_report_that_fails_ends_with_2_and_leaves_the_others(
    capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensortap.report.files import comparison_csv

    def full(result: object, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(comparison_csv, "write", full)
    ended = compare(capsys, "diverged", "b", "--csv", tmp_path / "a.csv", "--json", tmp_path / "a.json")
    assert ended.code == 2
    assert "a.csv could not be written: No space left on device" in ended.err
    assert "born here" in ended.out
    assert os.listdir(tmp_path) == ["a.json"]


# --- GitHub --------------------------------------------------------------------------------------------------------
def test_the_summary_of_a_step_is_appended_to(capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert compare(capsys, "diverged", "b").code == 1
    assert compare(capsys, "matching", "b", "--quiet").code == 0
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("before\n\n### ❌")
    assert "\n### ✅" in text


def test_a_summary_that_is_nearly_full_stays_below_its_limit(
    capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_bytes(b"x" * ((1 << 20) - 1000))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    compare(capsys, "diverged", "b")
    assert (1 << 20) - 1000 < summary.stat().st_size < 1 << 20


def test_a_summary_that_cannot_be_written_changes_no_verdict(
    capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "gone" / "summary.md"))
    ended = compare(capsys, "diverged", "b")
    assert ended.code == 1
    assert "GITHUB_STEP_SUMMARY could not be written" in ended.err


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_summaries_are_compared_without_pandas_or_a_compiler(tmp_path: Path, scale: float) -> None:
    """Importing them would take longer than the comparison."""
    for name in ("reference", "candidate"):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        with tt.capture(model, tmp_path / name):
            model(torch.ones(1, 3) * (scale if name == "candidate" else 1.0)).sum().backward()
    code = (
        "import sys, tensortap.cli\n"
        "try: tensortap.cli.main()\n"
        "except SystemExit as left: code = left.code\n"
        "assert not {'pandas', 'numba', 'torch'} & set(sys.modules), set(sys.modules)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "compare", str(tmp_path / "reference"), str(tmp_path / "candidate")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (scale != 1.0), done.stderr

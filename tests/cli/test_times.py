"""`tensortap times` on traces made by hand."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from showing import call

from support.traces import ENGINE, Trace

Capsys = pytest.CaptureFixture[str]


def run(capsys: Capsys, *words: str) -> tuple[int, str, str]:
    ended = call(capsys, *words)
    return ended.code, ended.out, ended.err


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    made = Trace()
    made.module("forward (root) (Net)", 10, 200)
    for i in range(40):
        made.module(f"forward layers.{i} (Linear)", 14 + 4.5 * i, 16 + 4.5 * i + i / 100, mark=0.25)
    made.span("Optimizer.step#AdamW.step", 210, 220)
    made.write(tmp_path / "a.json")
    return made


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    made = Trace()
    made.module("forward (root) (Net)", 10, 110)
    made.node("MulBackward0", 200, 240, tid=ENGINE)
    made.backward(["(root) (Net)"], 205, 230, tid=ENGINE)
    made.launch(1, 20)
    made.launch(2, 210, tid=ENGINE)
    made.kernel(1, 300, 10)
    made.kernel(2, 305, 40)
    made.kernel(77, 400, 1)
    return made.write(tmp_path / "gpu.json")


def test_thirty_rows_and_the_rest_in_a_line(trace: Trace, tmp_path: Path, capsys: Capsys) -> None:
    code, out, err = run(capsys, "times", str(tmp_path / "a.json"))
    assert (code, err) == (0, "")
    assert out.startswith("1 step · 212 µs on the CPU\n\nmodule")
    assert "14 more rows, " in out and "--top 0 shows all" in out
    _, out, _ = run(capsys, "times", str(tmp_path / "a.json"), "--top", "2")
    assert [line.split()[0] for line in out.splitlines()[3:5]] == ["(root)", "(annotating)"]
    _, out, _ = run(capsys, "times", str(tmp_path / "a.json"), "--top", "0")
    assert "more row" not in out and "layers.39" in out


def test_sorted_and_rolled_up(trace: Trace, tmp_path: Path, capsys: Capsys) -> None:
    _, out, _ = run(capsys, "times", str(tmp_path / "a.json"), "--by", "class", "--sort", "calls")
    assert out.splitlines()[3].split()[:3] == ["Linear", "forward", "40"]
    _, out, _ = run(capsys, "times", str(tmp_path / "a.json"), "--depth", "1", "--sort", "module")
    assert "layers " in out and "layers.1" not in out


def test_json_and_csv_have_all_rows(trace: Trace, tmp_path: Path, capsys: Capsys) -> None:
    path = str(tmp_path / "a.json")
    _, out, _ = run(capsys, "times", path, "--json", "-")
    facts = json.loads(out)
    assert facts["format"] == "tensortap-times" and facts["trace"] == path and len(facts["rows"]) == 44
    assert sum(row["cpu_own"] for row in facts["rows"]) == pytest.approx(facts["span"])
    _, out, _ = run(capsys, "times", path, "--csv", "-", "--top", "5")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["module"] for row in rows] == [row["module"] for row in facts["rows"][:5]]
    assert float(rows[0]["cpu_own"]) == facts["rows"][0]["cpu_own"]
    code, out, _ = run(capsys, "times", path, "--csv", str(tmp_path / "t.csv"), "--json", str(tmp_path / "t.json"))
    assert code == 0 and out.startswith("1 step")
    assert (tmp_path / "t.csv").read_text().startswith("module,class,phase,calls,cpu_own,")
    assert json.loads((tmp_path / "t.json").read_text()) == facts


def test_device_time_comes_first_where_there_is_some(gpu: Path, capsys: Capsys) -> None:
    _, out, _ = run(capsys, "times", str(gpu))
    assert "3 kernels of 51.0 µs · device busy 46.0 µs" in out
    assert "The launch of 1 kernel is not in the profile" in out
    assert out.splitlines()[4].split()[:3] == ["(root)", "Net", "backward"]
    assert "40.0 µs" in out.splitlines()[4]


def test_against_another_trace(trace: Trace, gpu: Path, tmp_path: Path, capsys: Capsys) -> None:
    trace.span("Optimizer.step#AdamW.step", 230, 290)
    trace.write(tmp_path / "b.json")
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    code, out, err = run(capsys, "times", b, "--against", a)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"this: {b} · 2 steps") and lines[1].startswith(f"reference: {a} · 1 step")
    assert lines[5].split() == ["(optimizer)", "AdamW", "other", "2", "10.0", "µs", "70.0", "µs", "+60.0", "µs", "7.00"]
    _, out, _ = run(capsys, "times", b, "--against", a, "--per-step")
    (line,) = [line for line in out.splitlines() if line.startswith("(optimizer)")]
    assert line.split()[-7:] == ["10.0", "µs", "35.0", "µs", "+25.0", "µs", "3.50"]
    _, out, _ = run(capsys, "times", b, "--against", a, "--json", "-")
    facts = json.loads(out)
    assert facts["candidate"]["trace"] == b and facts["rows"][0]["cpu_own_difference"] == 60
    _, out, _ = run(capsys, "times", str(gpu), "--against", a)
    assert "CPU own time" in out  # the other has none on a device


@pytest.mark.parametrize(
    ("words", "ended"),
    [
        (["none.json"], "there is no file none.json"),
        (["{}", "--sort", "size"], "sort: 'size' is not one of own"),
        (["{}", "--by", "depth"], "by: 'depth' is not one of module, class"),
        (["{}", "--top", "-1"], "--top -1"),
        (["{}", "--depth", "-1"], "depth: -1"),
        (["{}", "--json", "x", "--csv", "x"], "cannot both go to x"),
        (["{}", "--json", "none/x"], "there is no folder"),
        (["{}", "--against", "{}", "--html", "x"], "--html shows one trace"),
        (["{}", "--against", "{}", "--sort", "calls"], "by which two profiles can be compared"),
    ],
)
def test_invalid_options_are_refused(
    words: list[str], ended: str, trace: Trace, tmp_path: Path, capsys: Capsys
) -> None:
    code, out, err = run(capsys, "times", *(word.replace("{}", str(tmp_path / "a.json")) for word in words))
    assert (code, out) == (2, "") and ended in err and err.count("\n") == 1


def test_a_trace_without_annotations(tmp_path: Path, capsys: Capsys) -> None:
    plain = Trace()
    plain.span("aten::mm", 0, 10)
    code, _, err = run(capsys, "times", str(plain.write(tmp_path / "plain.json")))
    assert code == 2 and "with tensortap.annotate(model)" in err


def test_a_narrow_terminal(trace: Trace, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (40, 60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        _, out, _ = run(capsys, "times", str(tmp_path / "a.json"))
        assert max(map(len, out.splitlines())) <= columns

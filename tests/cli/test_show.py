"""`tensortap show`: filters, orders, widths, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from showing import call, record, write

from tensortap.cli.gather import sorts
from tensortap.core.records import Key, Record
from tensortap.kernels import summarize
from tensortap.store import RunWriter

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "a")
    return tmp_path / "a"


def records(capsys: Capsys, *args: object) -> list[dict[str, Any]]:
    ended = call(capsys, "show", *args, "--json")
    assert (ended.code, ended.err) == (0, "")
    found: list[dict[str, Any]] = json.loads(ended.out)["records"]
    return found


def test_the_page(capsys: Capsys, run: Path) -> None:
    ended = call(capsys, "show", run)
    assert (ended.code, ended.err) == (0, "")
    assert f"{run} · finished" in ended.out
    assert "Net, 4 modules" in ended.out
    assert "4 seen, 1 never called" in ended.out
    assert "never called: unused" in ended.out
    assert "16 records, in execution order" in ended.out
    assert "✗ 2 NaN" in ended.out
    assert len(ended.rows) == 16


@pytest.mark.parametrize(
    ("options", "count", "holds"),
    [
        (["--module", "layers.0.*"], 8, lambda r: r["module"].startswith("layers.0.")),
        (["--module", "(root)"], 4, lambda r: r["module"] == ""),
        (["--module", "(root)", "--module", "*.1.*"], 8, lambda r: r["module"] in ("", "layers.1.fc1")),
        (["--kind", "output"], 8, lambda r: r["kind"] == "output"),
        (["--kind", "output", "--kind", "grad_output"], 16, lambda r: True),
        (["--phase", "backward"], 8, lambda r: r["phase"] == "backward"),
        (["--step", "1"], 8, lambda r: r["step"] == 1),
        (["--step", "last"], 8, lambda r: r["step"] == 1),
        (["--step", "0,1"], 16, lambda r: True),
        (["--step", "1-9"], 8, lambda r: r["step"] == 1),
        (["--step", "7"], 0, lambda r: False),
        (["--rank", "0"], 16, lambda r: r["rank"] == 0),
        (["--nonfinite"], 1, lambda r: r["nan"] == 2),
        (["--limit", "3"], 3, lambda r: r["seq"] < 3),
        (["--limit", "0"], 16, lambda r: True),
        (["--kind", "output", "--step", "1", "--module", "*fc1"], 2, lambda r: r["module"].endswith("fc1")),
    ],
)
def test_filters(capsys: Capsys, run: Path, options: list[str], count: int, holds: Any) -> None:
    found = records(capsys, run, *options)
    assert len(found) == count
    assert all(holds(each) for each in found)
    assert [each["seq"] for each in found] == sorted(each["seq"] for each in found)


@pytest.mark.parametrize(
    "name",
    sorts(),
)
@pytest.mark.parametrize("sign", ["", "-"])
def test_orders(capsys: Capsys, run: Path, name: str, sign: str) -> None:
    derived = {
        "inf": lambda r: r["posinf"] + r["neginf"],
        "nonfinite": lambda r: r["nan"] + r["posinf"] + r["neginf"],
        "absmax": lambda r: max(abs(r["min"]), abs(r["max"])),
        "rms": lambda r: r["l2"] / (r["elements"] - r["nan"] - r["posinf"] - r["neginf"]) ** 0.5,
        "var": lambda r: r["std"] ** 2,
    }
    found = records(capsys, run, "--sort", sign + name)
    values = [derived.get(name, lambda r: r[name])(each) for each in found]
    assert values == sorted(values, reverse=bool(sign))
    ties = [(value, each["seq"]) for value, each in zip(values, found, strict=True)]
    assert all(left[1] < right[1] for left, right in pairwise(ties) if left[0] == right[0])
    assert call(capsys, "show", run, "--sort", sign + name).code == 0


def test_values_that_are_no_number_come_last_both_ways(capsys: Capsys, tmp_path: Path) -> None:
    write(tmp_path / "a", steps=1, extra=(record(99, "x", 0, "output", mean=float("nan")),))
    for sign in ("", "-"):
        assert records(capsys, tmp_path / "a", "--sort", f"{sign}mean")[-1]["seq"] == 99


def test_hidden_rows_are_counted(capsys: Capsys, run: Path) -> None:
    ended = call(capsys, "show", run, "--limit", "5", "--kind", "output")
    assert "5 of 8 records that match (16 in all)" in ended.out
    assert "3 more: --limit 0 shows all" in ended.out
    assert len(ended.rows) == 5


def test_twenty_rows_by_default(capsys: Capsys, tmp_path: Path) -> None:
    write(tmp_path / "a", steps=5)
    assert len(call(capsys, "show", tmp_path / "a").rows) == 20
    assert len(call(capsys, "show", tmp_path / "a", "--limit", "0").rows) == 40


def test_a_wrong_module_name_gets_a_suggestion(capsys: Capsys, run: Path) -> None:
    ended = call(capsys, "show", run, "--module", "layer.0.fc1")
    assert ended.code == 0
    assert "none of the 16 records matches" in ended.out
    assert "did you mean layers.0.fc1" in ended.out


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--kind", "outptu"], "did you mean output?"),
        (["--phase", "sideways"], "forward, backward, state"),
        (["--sort", "weight"], "use one of seq"),
        (["--sort", "--l2"], "use one of seq"),
        (["--step", "three"], "use 3, 0,5, 10-20"),
        (["--step", "1,,2"], "is not a step"),
        (["--rank", "4"], "has rank 0"),
        (["--limit", "-1"], "0 for all"),
        (["--sketch"], "needs --json"),
    ],
)
def test_wrong_usage_is_one_line(capsys: Capsys, run: Path, options: list[str], part: str) -> None:
    ended = call(capsys, "show", run, *options)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("tensortap: ")
    assert ended.err.count("\n") == 1
    assert part in ended.err


def test_a_path_that_is_not_a_run_is_one_line(capsys: Capsys, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("gone", "file", "empty", "new\nline\x1b[2J"):
        ended = call(capsys, "show", tmp_path / name)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith("tensortap: ")
        assert ended.err.rstrip("\n").isprintable()


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("options", [[], ["--coverage"], ["--sort", "-l2"], ["--nonfinite"], ["--module", "nope"]])
def test_no_line_is_longer_than_the_terminal(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int, options: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", extra=(record(99, "model.decoder." * 6 + "q_proj", 1, "grad_output", nan=12),))
    ended = call(capsys, "show", "a", "--limit", "0", *options)
    assert ended.code == 0
    assert max(map(cell_len, ended.out.splitlines())) <= columns


def test_a_pipe_gets_everything_uncut_and_uncoloured(capsys: Capsys, tmp_path: Path) -> None:
    name = "model.decoder." * 12 + "q_proj"
    write(tmp_path / "a", extra=(record(99, name, 1, "output"),))
    ended = call(capsys, "show", tmp_path / "a", "--limit", "0")
    assert name in ended.out
    assert "\x1b" not in ended.out


@pytest.mark.parametrize("name", ["[red]x[/red]", "a\nb", "\x1b[2J", "\u202eevil", "[/nope]"])
def test_hostile_names_are_shown_harmlessly(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # through rich, as on a terminal
    write(tmp_path / "a", steps=1, extra=(record(99, name, 0, "output"),))
    ended = call(capsys, "show", tmp_path / "a", "--limit", "0")
    assert ended.code == 0
    assert "\x1b[2J" not in ended.out
    assert "\u202e" not in ended.out
    assert len(ended.rows) == 9
    if name.isprintable():
        assert name in ended.out


def test_an_empty_run(capsys: Capsys, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", info={}):
        pass
    ended = call(capsys, "show", tmp_path / "a")
    assert ended.code == 0
    assert "no records" in ended.out
    assert json.loads(call(capsys, "show", tmp_path / "a", "--json").out)["records"] == []


def test_a_run_without_ranks(capsys: Capsys, run: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/run.json").write_text((run / "run.json").read_text())
    ended = call(capsys, "show", tmp_path / "bare")
    assert ended.code == 0
    assert "not finished" in ended.out


def test_a_killed_run(capsys: Capsys, tmp_path: Path) -> None:
    code = (
        "import os, sys; from showing import record; from tensortap.store import RunWriter\n"
        "writer = RunWriter(sys.argv[1], info={})\n"
        "[writer.append(record(n, 'fc', 0, 'output')) for n in range(5)]\n"
        "writer.flush(); os.kill(os.getpid(), 9)"
    )
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "a"], env=here).returncode == -9
    ended = call(capsys, "show", tmp_path / "a")
    assert ended.code == 0
    assert "not finished" in ended.out
    assert "! rank 0: it was not closed" in ended.out
    assert len(ended.rows) == 5


def test_several_ranks(capsys: Capsys, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / "a", rank=rank, world=3)
    assert {each["rank"] for each in records(capsys, tmp_path / "a")} == {0, 1}
    assert {each["rank"] for each in records(capsys, tmp_path / "a", "--rank", "1")} == {1}
    ended = call(capsys, "show", tmp_path / "a", "--sort", "-min", "--limit", "4")
    assert "2 of 3 ranks" in ended.out
    header = next(line for line in ended.out.splitlines() if "dtype" in line).split()
    assert [row[header.index("rank")] for row in ended.rows] == ["0", "1", "0", "1"]


def test_sketches_only_on_demand(capsys: Capsys, run: Path) -> None:
    assert "sketch" not in records(capsys, run)[0]
    found = records(capsys, run, "--sketch", "--sort", "-seq")
    assert all(each["sketch"] == [each["seq"]] * 4 for each in found)


def test_json_counts_matching_records(capsys: Capsys, run: Path) -> None:
    value = json.loads(call(capsys, "show", run, "--json", "--limit", "1", "--kind", "output").out)
    assert (value["matching"], len(value["records"]), value["run"]["records"]) == (8, 1, 16)
    assert value["run"]["tensors"] == 16
    assert value["run"]["bytes_on_disk"] == sum(p.stat().st_size for p in run.rglob("*") if p.is_file())


def test_a_real_model_is_shown(capsys: Capsys, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import tensortap

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    with tensortap.capture(model, tmp_path / "a", keep="tensors"):
        model(torch.from_numpy(np.ones((2, 4), np.float32))).sum().backward()
    ended = call(capsys, "show", tmp_path / "a")
    assert ended.code == 0
    assert "Sequential, 3 modules" in ended.out
    assert "torch" in ended.out


# --- plain arguments -----------------------------------------------------------------------------------------------
@pytest.fixture
def called(tmp_path: Path) -> Path:
    with RunWriter(tmp_path / "called", info={"framework": "torch"}, calls=True) as writer:
        writer.called(0, 0, "layers.0", 0, {"is_causal": True, "past": {"object": "Cache"}})
        writer.called(1, 0, "layers.0", 0, {"is_causal": False, "text": "a\n\x1b[2J"})
        writer.called(0, 0, "layers.1", 0, {"1": {"float": "nan"}})
        for seq, (step, module) in enumerate([(0, "layers.0"), (0, "layers.1"), (1, "layers.0"), (1, "layers.2")]):
            writer.append(record(seq, module, step, "output"))
    return tmp_path / "called"


def test_plain_arguments_of_modules(capsys: Capsys, called: Path) -> None:
    ended = call(capsys, "show", called)
    assert ended.out.rstrip().endswith(
        "called with\n"
        "layers.0: is_causal=True, past=a Cache object\n"
        "layers.1: 1=nan\n"
        "layers.0: is_causal=False, text='a\\n\\x1b[2J'"
    )
    assert "is_causal=False" not in call(capsys, "show", called, "--step", "0").out
    assert "called with" not in call(capsys, "show", called, "--module", "layers.2").out


def test_plain_arguments_of_each_record_in_json(capsys: Capsys, called: Path, run: Path) -> None:
    assert [each["arguments"] for each in records(capsys, called)] == [
        {"is_causal": True, "past": {"object": "Cache"}},
        {"1": {"float": "nan"}},
        {"is_causal": False, "text": "a\n\x1b[2J"},
        {},
    ]
    assert {each["arguments"] for each in records(capsys, run)} == {None}, "a run of an older version"
    assert "called with" not in call(capsys, "show", run).out


def test_the_page_of_a_run_shows_first_arguments(capsys: Capsys, called: Path) -> None:
    out = called.with_name("page.html")
    assert call(capsys, "report", called, "-o", out, "-q").code == 0
    page = out.read_text(encoding="utf-8")
    assert "is_causal=True, past=a Cache object; changed 1 time" in page
    assert "<code>1=nan</code>" in page


def test_many_calls_are_cut(capsys: Capsys, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "many", info={}, calls=True) as writer:
        for seq in range(30):
            writer.called(0, 0, f"m{seq}", 0, {"n": seq})
            writer.append(record(seq, f"m{seq}", 0, "output"))
    ended = call(capsys, "show", tmp_path / "many", "--limit", "0")
    assert "m11: n=11" in ended.out
    assert ended.out.rstrip().endswith("and 18 more: --module chooses")


def test_bytes_are_verified(capsys: Capsys, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", info={}) as writer:
        for number in range(3):
            array = np.full((2, 2), number, np.float32)
            where = writer.put(f"tensor {number}", array, step=0)
            key = Key(0, 0, "forward", f"fc{number}", 0, "output", "0")
            writer.append(Record(key, 0, number, "Linear", "float32", (2, 2), number, summarize(array), where))
    ended = call(capsys, "show", tmp_path / "a", "--verify")
    assert ended.code == 0 and "verified 3 kept tensors: their bytes match their digests" in ended.err
    shard = next((tmp_path / "a/rank_0").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    ended = call(capsys, "show", tmp_path / "a", "--verify")
    assert ended.code == 2 and "1 of 3 kept tensors are damaged" in ended.err and ended.out == ""

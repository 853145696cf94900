"""`tensortap compare` on real runs: exit codes, errors for unreadable runs, and written files."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet
import pytest
from made_runs import Seen, chain, values, write

import tensortap as tt
from tensortap.cli import main
from tensortap.compare.say.columns import SCHEMA

Capsys = pytest.CaptureFixture[str]


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


def compare(capsys: Capsys, *args: object) -> CommandResult:
    before, sys.argv = sys.argv, ["tensortap", "compare", *map(str, args)]
    try:
        with pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = before
    return CommandResult(int(end.value.code or 0), *capsys.readouterr())


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """reference, same, other, foreign names, and a small checkpoint."""
    write(tmp_path / "reference", chain())
    write(tmp_path / "same", chain())
    write(tmp_path / "other", chain(off={"fc2": 0.5}))
    write(tmp_path / "foreign", chain(("x", "y")))
    return tmp_path


# --- how it ends ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("candidate", "code", "words"),
    [
        ("same", 0, "The runs match: all 6 pairs are equal bit for bit."),
        ("other", 1, "The runs part in fc2 (Linear): in step 0, its output 0 is off by"),
        ("foreign", 3, "Too little in common to judge"),
    ],
)
def test_exit_codes(capsys: Capsys, runs: Path, candidate: str, code: int, words: str) -> None:
    ended = compare(capsys, runs / "reference", runs / candidate)
    assert (ended.code, ended.err) == (code, "")
    assert words in ended.out
    assert compare(capsys, runs / "reference", runs / candidate, "--exit-zero").code == 0
    assert compare(capsys, runs / "reference", runs / candidate, "--quiet") == (code, "", "")


def test_options_have_their_documented_effect(capsys: Capsys, runs: Path) -> None:
    two = runs / "reference", runs / "other"
    for options, code in (
        (["--rtol", 10], 0),
        (["--atol", 1], 0),
        (["--rtol", "1e-6"], 1),
        (["--module", "fc1"], 0),
        (["--module", "fc2"], 1),
        (["--kind", "input"], 0),
        (["--module", "(root)"], 3),
        (["--step", "0"], 1),
        (["--step", "5"], 3),
        (["--step", "0:0"], 1),
        (["--rank", 0], 1),
        (["--rank", 1], 3),
        (["--noise", runs / "other"], 0),
        (["--noise", runs / "same"], 1),
        (["--until-first"], 1),
        (["--workers", 1], 1),
        (["--rename", "fc2=fc9"], 0),
    ):
        assert compare(capsys, *two, *options).code == code, options


def test_names_that_differ_lead_to_a_rename_that_can_be_pasted(capsys: Capsys, runs: Path) -> None:
    write(runs / "wrapped", chain(("net.fc1", "net.fc2", "net.fc3")))
    ended = compare(capsys, runs / "reference", runs / "wrapped")
    assert ended.code == 3
    assert r"--rename '^net\.='" in ended.out
    assert compare(capsys, runs / "reference", runs / "wrapped", "--rename", r"^net\.=").code == 0


def test_rules_of_names(capsys: Capsys, runs: Path) -> None:
    write(runs / "renamed", chain(("first", "fc2", "fc3")))
    (runs / "names").write_text('structure = false\n[[module]]\ncandidate = "first"\nreference = "fc1"\n')
    assert compare(capsys, runs / "reference", runs / "renamed", "--map", runs / "names").code == 0
    (runs / "old").write_text("first = fc1\n")
    (runs / "names").write_text("first -> fc1\n")
    for bad in (runs / "old", runs / "names", runs / "gone", runs):
        ended = compare(capsys, runs / "reference", runs / "renamed", "--map", bad)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)


# --- what cannot be read -------------------------------------------------------------------------------------------
def _json(path: Path, **changes: Any) -> None:
    file = path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _cut(pattern: str, to: int) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        (file,) = path.glob(pattern)
        file.write_bytes(file.read_bytes()[:to])

    return cut


def _gone(pattern: str) -> Callable[[Path], None]:
    def gone(path: Path) -> None:
        (file,) = path.glob(pattern)
        file.unlink()

    return gone


def _emptied(path: Path) -> None:
    for file in sorted(path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def _foreign(path: Path) -> None:
    _emptied(path)
    (path / "notes.txt").write_text("nothing of ours")


def _not_an_index(path: Path) -> None:
    """A whole Arrow stream, of other columns."""
    import pyarrow as pa

    with pa.ipc.new_stream(str(path / "rank_0" / "index.arrows"), pa.schema([("x", pa.int64())])):
        pass


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "an empty folder": (_emptied, "is not a run: it has no run.json. The folder is empty."),
    "a foreign folder": (_foreign, "It holds notes.txt."),
    "a newer version": (lambda path: _json(path, version=99), "99"),
    "another format": (lambda path: _json(path, format="something else"), "run.json"),
    "run.json gone": (_gone("run.json"), "run.json is missing: "),
    "run.json cut": (_cut("run.json", 20), "run.json is damaged"),
    "run.json empty": (_cut("run.json", 0), "run.json is damaged"),
    "run.json of bytes": (lambda path: (path / "run.json").write_bytes(b"\xff\xfe{}"), "run.json is damaged"),
    "tensors cut": (_cut("rank_0/*.safetensors", 5000), "is cut off"),
    "tensors gone": (_gone("rank_0/*.safetensors"), "is missing: the tensors in it cannot be loaded"),
    "not an index": (_not_an_index, "its columns are not those of an index"),
    "not there": (lambda path: (_emptied(path), path.rmdir()), "does not exist: no run to open."),
    "a file": (lambda path: (_emptied(path), path.rmdir(), path.write_text("")), "is a file of no known format"),
}


@pytest.mark.parametrize("side", ["reference", "candidate", "noise"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unreadable_run_is_reported_in_one_line(capsys: Capsys, runs: Path, damage: str, side: str) -> None:
    write(runs / "noisy", chain(off={"fc2": 0.1}))
    break_it, words = DAMAGES[damage]
    target = {"reference": runs / "reference", "candidate": runs / "other", "noise": runs / "noisy"}[side]
    break_it(target)
    ended = compare(capsys, runs / "reference", runs / "other", "--noise", runs / "noisy")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("tensortap: ")
    assert len(ended.err.splitlines()) == 1, ended.err
    assert words in ended.err
    assert str(target) in ended.err
    zero = compare(capsys, runs / "reference", runs / "other", "--noise", runs / "noisy", "--exit-zero")
    assert zero.code == 2, "it is about the verdict; there is none"


@pytest.mark.parametrize("name", ["gone.safetensors", "gone.pt", "x" * 5000, "a\tb\nc"])
def test_impossible_paths(capsys: Capsys, runs: Path, name: str) -> None:
    ended = compare(capsys, runs / "reference", runs / name)
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (2, "", 1)


@pytest.mark.parametrize("call", ["is_dir", "iterdir", "exists"])
def test_a_folder_that_may_not_be_entered(
    capsys: Capsys, runs: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    usual = getattr(Path, call)

    def refused(self: Path, *given: Any, **options: Any) -> Any:
        if self == runs / "other":
            raise PermissionError(13, "Permission denied", str(self))
        return usual(self, *given, **options)

    monkeypatch.setattr(Path, call, refused)
    ended = compare(capsys, runs / "reference", runs / "other")
    assert (ended.code, ended.out) == (2, "")
    assert str(runs / "other") in ended.err
    assert "Permission denied" in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("suffix", ["index.arrows", ".safetensors", "run.json"])
def test_a_file_that_may_not_be_read(capsys: Capsys, runs: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    import os

    import pyarrow as pa

    def refusing(usual: Callable[..., Any]) -> Callable[..., Any]:
        def refused(path: Any, *given: Any, **options: Any) -> Any:
            if str(path).endswith(suffix) and str(runs / "other") in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return usual(path, *given, **options)

        return refused

    monkeypatch.setattr(os, "open", refusing(os.open))
    monkeypatch.setattr(pa, "memory_map", refusing(pa.memory_map))
    monkeypatch.setattr(Path, "read_bytes", refusing(Path.read_bytes))
    monkeypatch.setattr(Path, "read_text", refusing(Path.read_text))
    monkeypatch.setattr(Path, "open", refusing(Path.open))
    ended = compare(capsys, runs / "reference", runs / "other")
    assert (ended.code, ended.out) == (2, "")
    assert "Permission denied" in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_torn_index_is_compared_as_far_as_it_goes(capsys: Capsys, runs: Path, share: float) -> None:
    names = [f"fc{n}" for n in range(400)]
    write(runs / "long", chain(names))
    write(runs / "torn", chain(names))
    index = runs / "torn" / "rank_0" / "index.arrows"
    index.write_bytes(index.read_bytes()[: int(index.stat().st_size * share)])
    result = tt.compare(runs / "long", runs / "torn")
    left = len(tt.open(runs / "torn"))
    assert left < 800
    assert result.counts == ({"equal": left} if left else {}) | {"unmatched": 800 - left}
    assert any("candidate: rank 0: " in note and "cut off" in note for note in result.notes)
    ended = compare(capsys, runs / "long", runs / "torn")
    assert ended.code == (0 if left else 3)
    assert f"{left} records before them are intact" in ended.out


def test_an_unfinished_run_is_reported(capsys: Capsys, runs: Path) -> None:
    status = runs / "same" / "rank_0" / "rank.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "running"}))
    ended = compare(capsys, runs / "reference", runs / "same")
    assert ended.code == 0
    assert "it was not closed" in ended.out


# --- what it writes ------------------------------------------------------------------------------------------------
WRONG = 'wrong, "so" <&> it\'s'
FORMATS = ("csv", "json", "junit", "markdown", "parquet")


@pytest.fixture
def written(capsys: Capsys, tmp_path: Path) -> Path:
    """All formats of a comparison with one of everything: equal, close, wrong, not finite, reshaped, one-sided."""
    good = values(1)
    nan = good.copy()
    nan[0, 0] = np.nan
    modules: dict[str, tuple[Any, Any]] = {
        "": (good, good),
        "close": (good, good * np.float32(1 + 1e-7)),
        WRONG: (good, good * 2),
        "layers.0.nan": (good, nan),
        "layers.0.shape": (good, values(1, (6, 4))),
        "zero": (np.zeros(3, np.float32), np.ones(3, np.float32)),
        "only.ours": (good, None),
        "only.theirs": (None, good),
    }
    for side, name in enumerate(("a", "b")):
        write(tmp_path / name, [Seen(module, two[side]) for module, two in modules.items() if two[side] is not None])
    folder = tmp_path / "written"
    folder.mkdir()
    options = [word for name in FORMATS for word in (f"--{name}", folder / name)]
    ended = compare(capsys, tmp_path / "a", tmp_path / "b", *options)
    assert (ended.code, ended.err) == (1, "")
    return folder


def test_parquet(written: Path) -> None:
    table = pyarrow.parquet.read_table(written / "parquet")
    assert table.schema.names == SCHEMA.names
    found = dict(zip(table["module"].to_pylist(), table["status"].to_pylist(), strict=True))
    assert found == {
        "": "equal",
        "close": "close",
        WRONG: "diverged",
        "layers.0.nan": "nonfinite",
        "layers.0.shape": "shape",
        "zero": "diverged",
    }


def test_csv(written: Path) -> None:
    table = pyarrow.parquet.read_table(written / "parquet")
    with (written / "csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == table["status"].to_pylist()
    wrong = next(row for row in rows if row["module"].startswith("wrong"))
    assert wrong["module"] == WRONG
    assert float(wrong["rel_l2"]) == table["rel_l2"].to_pylist()[rows.index(wrong)]
    assert float(wrong["rel_l2"]) == pytest.approx(1, 1e-9)


def test_json(written: Path) -> None:
    found = json.loads((written / "json").read_text())
    assert (found["verdict"], found["first"]["module"]) == ("diverged", WRONG)
    assert found["counts"] == {"equal": 1, "close": 1, "diverged": 2, "nonfinite": 1, "shape": 1, "unmatched": 2}
    assert {(u["side"], u["module"]) for u in found["unmatched"]} == {
        ("reference", "only.ours"),
        ("candidate", "only.theirs"),
    }
    by_name = {row["module"]: row for row in found["rows"]}
    assert by_name["layers.0.nan"]["nan_candidate"] == 1
    assert by_name["zero"]["rel_l2"] is None, "JSON knows no infinity"
    assert by_name["layers.0.shape"]["shape_candidate"] == [6, 4]
    assert found["sentence"] == str(tt.compare(found["reference"], found["candidate"]))


def test_junit(written: Path) -> None:
    root = ElementTree.parse(written / "junit").getroot()
    assert [root.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["8", "4", "0", "2"]
    failed = {case.get("name") for case in root.iter("testcase") if case.find("failure") is not None}
    assert failed == {WRONG, "layers.0.nan", "layers.0.shape", "zero"}


def test_markdown(written: Path) -> None:
    text = (written / "markdown").read_text(encoding="utf-8")
    assert text.startswith("### ❌")
    assert "layers.0.nan" in text
    assert "<&>" not in text, "names are not markup"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_every_verdict(capsys: Capsys, runs: Path, name: str) -> None:
    for candidate, code in (("same", 0), ("other", 1), ("foreign", 3)):
        path = runs / f"{candidate}.{name}"
        assert compare(capsys, runs / "reference", runs / candidate, f"--{name}", path, "-q") == (code, "", "")
        assert path.stat().st_size > 50


def test_nothing_is_written_where_there_is_no_verdict(capsys: Capsys, runs: Path) -> None:
    assert compare(capsys, runs / "reference", runs / "gone", "--json", runs / "out.json").code == 2
    assert not (runs / "out.json").exists()

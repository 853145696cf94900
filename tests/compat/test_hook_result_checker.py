"""The checker: its tables digit for digit, its notes, and how it ends."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap
from tensortap.cli import main as tensortap_main
from tensortap.compat.hook_result_checker import find_column, main
from tensortap.errors import UsageError

HEADER = "tensor_name,cosine similarity,meanA,meanB,meanA - meanB,stdA,stdB,stdA - stdB,varA,varB,varA - varB"
Capsys = pytest.CaptureFixture[str]


def name(index: int, layer: str = "fc", micro: int = 0) -> str:
    return f"tensor_idx_{index}_layer_class_Linear_layer_name_{layer}_micro_step_{micro}.npy"


def grad(index: int, parameter: str = "fc.w", micro: int = 0) -> str:
    return f"grad_idx_{index}_of_param_name_{parameter}_micro_step_{micro}.npy"


def put(root: Path, file: str, array: Any, kind: str = "tensors", rank: int = 0) -> None:
    folder = root / kind / f"rank_{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / file, array)


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def check(a: Path, b: Path, *more: str) -> int:
    return main(["--pathA", str(a), "--pathB", str(b), *more])


def table(root: Path, kind: str = "tensors", rank: int = 0, what: str = "rst") -> list[dict[str, str]]:
    with (root / kind / "compare_rst" / f"rank_{rank}_{what}.csv").open() as file:
        return list(csv.DictReader(file))


def notes(root: Path, kind: str = "tensors") -> list[tuple[str, ...]]:
    return [tuple(row.values()) for row in table(root, kind, what="notes")]


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a", tmp_path / "b"


# --- the table -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_the_numbers_are_those_of_numpy(trees: tuple[Path, Path], dtype: Any) -> None:
    a, b = trees
    arrays = {}
    for index, shape in enumerate([(), (7,), (33, 65), (300, 301)]):
        ours = (random(*shape, seed=index) * 100 + 7).astype(dtype)
        theirs = (ours * 1.25 + random(*shape, seed=9)).astype(dtype)
        arrays[name(index)] = ours, theirs
        put(a, name(index), ours)
        put(b, name(index), theirs)
    assert check(a, b) == 1
    text = (a / "tensors/compare_rst/rank_0_rst.csv").read_text()
    assert text.splitlines()[0] == HEADER
    assert "\r" not in text
    rows = table(a)
    assert [row["tensor_name"] for row in rows] == list(arrays)
    for row in rows:
        x, y = (array.astype(np.float64).ravel() for array in arrays[row["tensor_name"]])
        truth = {"cosine similarity": x @ y / np.linalg.norm(x) / np.linalg.norm(y)}
        for word, function in (("mean", np.mean), ("std", np.std), ("var", np.var)):
            truth |= {f"{word}A": function(x), f"{word}B": function(y), f"{word}A - {word}B": function(x) - function(y)}
        for column, expected in truth.items():
            assert float(row[column]) == pytest.approx(expected, rel=1e-9, abs=1e-12), column


def test_the_mean_of_a_normalised_tensor_keeps_its_digits(trees: tuple[Path, Path]) -> None:
    a, b = trees
    array = random(64, 256)
    array -= array.mean(-1, keepdims=True)
    for root in trees:
        put(root, name(0), array)
    assert check(a, b) == 0
    assert float(table(a)[0]["meanA"]) == pytest.approx(float(array.mean(dtype=np.float64)), rel=1e-9, abs=0)


def test_rows_are_in_the_order_of_the_index(trees: tuple[Path, Path]) -> None:
    a, b = trees
    for root in trees:
        for index in (10, 9, 100, 0, 1):
            put(root, name(index, "z" if index == 0 else "a"), random(3))
    assert check(a, b) == 0
    assert [row["tensor_name"] for row in table(a)] == [name(0, "z"), *(name(i, "a") for i in (1, 9, 10, 100))]


def test_counters_that_start_again_are_ordered_by_micro_step(trees: tuple[Path, Path]) -> None:
    a, b = trees
    for root in trees:
        for micro in range(2):
            for index in range(2):
                put(root, name(index, micro=micro), random(3))
    assert check(a, b) == 0
    found = [row["tensor_name"] for row in table(a)]
    assert found == [name(0), name(1), name(0, micro=1), name(1, micro=1)]


def test_gradients_and_ranks_have_tables_of_their_own(trees: tuple[Path, Path], capsys: Capsys) -> None:
    a, b = trees
    for root in trees:
        for rank in range(2):
            put(root, name(0), random(3), rank=rank)
            put(root, grad(0), random(3), "grads", rank)
            put(root, name(1, "as_the_other_spelling"), random(3), "grads", rank)
    put(a, name(0), random(3), rank=2)
    for _ in range(2):  # the second time, the results of the first are next to the ranks
        assert check(a, b) == 3
    assert [row["tensor_name"] for row in table(a, "grads", 1)] == [grad(0), name(1, "as_the_other_spelling")]
    assert len(table(a, "tensors", 1)) == 1
    said = capsys.readouterr()
    assert "only in A: rank_2" in said.out
    assert "grads rank_1" in said.err  # the bars


# --- which file belongs to which -------------------------------------------------------------------------------------
def save_in_order(root: Path, layers: list[str]) -> dict[str, str]:
    """Write a file for each call, with values derived from layer and call; return the files by both."""
    files: dict[str, str] = {}
    for index, layer in enumerate(layers):
        call = f"{layer}.{layers[:index].count(layer)}"
        files[call] = name(index, layer)
        put(root, files[call], random(8, seed=sum(map(ord, call))))
    return files


def test_a_call_of_one_side_alone_leaves_later_files_paired(trees: tuple[Path, Path], capsys: Capsys) -> None:
    """An expert that gets no tokens is not called, and the numbers of all later files are others."""
    a, b = trees
    ours = save_in_order(a, ["stem", "expert_1", "expert_2", "head"])
    theirs = save_in_order(b, ["stem", "expert_2", "head", "late"])
    assert check(a, b) == 0
    assert [row["tensor_name"] for row in table(a)] == [ours["stem.0"], ours["expert_2.0"], ours["head.0"]]
    assert all(float(row["cosine similarity"]) == pytest.approx(1) for row in table(a))
    moved = [(ours[call], "paired by name", ours[call], theirs[call]) for call in ("expert_2.0", "head.0")]
    left = [(ours["expert_1.0"], "only in A", "", ""), (theirs["late.0"], "only in B", "", "")]
    assert notes(a) == moved + left
    assert "3 compared" in (said := capsys.readouterr().out)
    assert "2 paired by name although their running numbers differ; 1 only in A; 1 only in B" in said


def test_each_call_of_a_layer_finds_the_same_call_of_the_other_side(trees: tuple[Path, Path]) -> None:
    """Behind a gap, the name of one call may be the name of another one: cell 1 here is number 2, there number 1."""
    a, b = trees
    ours = save_in_order(a, ["gate", "cell", "cell", "cell"])
    theirs = save_in_order(b, ["cell", "cell", "cell"])
    assert check(a, b) == 0
    assert all(float(row["cosine similarity"]) == pytest.approx(1) for row in table(a))
    cells = [(ours[call], "paired by name", ours[call], theirs[call]) for call in ("cell.0", "cell.1", "cell.2")]
    assert notes(a) == [*cells, (ours["gate.0"], "only in A", "", "")]


def test_equal_names_are_paired_first_if_one_side_calls_a_layer_more_often(trees: tuple[Path, Path]) -> None:
    a, b = trees
    save_in_order(a, ["fc", "fc", "fc"])
    save_in_order(b, ["fc", "fc", "fc"])
    (b / "tensors/rank_0" / name(1, "fc")).unlink()
    assert check(a, b) == 0
    assert [row["tensor_name"] for row in table(a)] == [name(0, "fc"), name(2, "fc")]
    assert notes(a) == [(name(1, "fc"), "only in A", "", "")]


def test_a_name_that_ends_in_a_number_is_paired_separately(trees: tuple[Path, Path]) -> None:
    """No name is common here, yet conv_1 is conv_1: the rule for paddle's counters must not take conv_2 for it."""
    a, b = trees
    ours, theirs = (
        save_in_order(root, layers) for root, layers in ((a, ["stem", "conv_1", "conv_2"]), (b, ["conv_1", "conv_2"]))
    )
    assert check(a, b) == 0
    assert [row[1:] for row in notes(a)] == [
        *(("paired by name", ours[call], theirs[call]) for call in ("conv_1.0", "conv_2.0")),
        ("only in A", "", ""),
    ]


# --- what a table cannot say ---------------------------------------------------------------------------------------
def test_only_common_files_are_compared_and_the_others_are_reported(trees: tuple[Path, Path], capsys: Capsys) -> None:
    a, b = trees
    for root in trees:
        put(root, name(0), random(3))
    put(a, name(1, "ours"), random(3))
    put(b, name(2, "theirs"), random(3))
    assert check(a, b) == 0
    assert len(table(a)) == 1
    assert notes(a) == [(name(1, "ours"), "only in A", "", ""), (name(2, "theirs"), "only in B", "", "")]
    assert "1 compared" in (said := capsys.readouterr().out)
    assert "1 only in A; 1 only in B" in said


def test_shapes_that_differ_are_not_compared(trees: tuple[Path, Path]) -> None:
    a, b = trees
    put(a, name(0), random(3, 8))
    put(b, name(0), random(8, 3))
    for root in trees:
        put(root, name(1), random(2))
    assert check(a, b) == 1
    assert [row["tensor_name"] for row in table(a)] == [name(1)]
    assert notes(a) == [(name(0), "shape", "(3, 8)", "(8, 3)")]


@pytest.mark.parametrize("bad", [[np.nan], [np.inf], [-np.inf], [np.inf, -np.inf]])
def test_nonfinite_values_propagate_as_in_numpy(trees: tuple[Path, Path], bad: list[float]) -> None:
    a, b = trees
    array = random(10)
    array[: len(bad)] = bad
    put(a, name(0), array)
    put(b, name(0), random(10))
    assert check(a, b) == 1
    (row,) = table(a)
    with np.errstate(invalid="ignore"):
        assert float(row["meanA"]) == pytest.approx(float(array.astype(np.float64).mean()), nan_ok=True)
    assert np.isnan([float(row[c]) for c in ("cosine similarity", "stdA", "varA")]).all()
    assert np.isfinite(float(row["stdB"]))
    nan = int(np.isnan(array).sum())
    assert notes(a) == [(name(0), "not finite", f"{nan} nan, {len(bad) - nan} inf", "0 nan, 0 inf")]


def test_zeros_have_a_cosine(trees: tuple[Path, Path]) -> None:
    a, b = trees
    for root in trees:
        put(root, name(0), np.zeros(4, np.float32))
    put(a, name(1), np.zeros(4, np.float32))
    put(b, name(1), random(4))
    assert check(a, b) == 1
    assert [row["cosine similarity"] for row in table(a)] == ["1.0", "0.0"]
    assert notes(a) == [(name(0), "zero norm", "yes", "yes"), (name(1), "zero norm", "yes", "no")]


def test_unreadable_files_are_reported(trees: tuple[Path, Path], capsys: Capsys) -> None:
    """Readable files are compared; exit code and notes report the others on their side."""
    a, b = trees
    for root in trees:
        for index in range(5):
            put(root, name(index, f"fc{index}"), random(3))
    ours, theirs = (root / "tensors/rank_0" for root in trees)
    (ours / name(0, "fc0")).write_bytes(b"\x93NUMPY")
    np.save(theirs / name(1, "fc1"), np.array([{}], object), allow_pickle=True)
    torn = theirs / name(2, "fc2")
    torn.write_bytes(torn.read_bytes()[:-4])
    with (theirs / name(3, "fc3")).open("wb") as archive:
        np.savez(archive, x=random(3))
    assert check(a, b) == 2
    assert [row["tensor_name"] for row in table(a)] == [name(4, "fc4")]
    found = notes(a)
    assert [row[:2] for row in found] == [(name(index, f"fc{index}"), "unreadable") for index in range(4)]
    assert [(bool(row[2]), bool(row[3])) for row in found] == [(True, False), *[(False, True)] * 3]
    assert "cut off" in found[2][3]
    said = capsys.readouterr()
    assert "1 compared" in said.out and "4 unreadable" in said.out
    assert "4 could not be read" in said.err


def test_both_truncated_files_are_reported(trees: tuple[Path, Path]) -> None:
    for root in trees:
        put(root, name(0), random(3))
        (root / "tensors/rank_0" / name(0)).write_bytes(b"")
    assert check(*trees) == 2
    ((_, note, *reasons),) = notes(trees[0])
    assert note == "unreadable" and all(reasons)


def test_non_numeric_files_are_reported_on_their_side(trees: tuple[Path, Path]) -> None:
    a, b = trees
    put(a, name(0), random(3))
    put(b, name(0), np.array(["x", "y", "z"]))
    assert check(a, b) == 2
    ((_, note, ours, theirs),) = notes(a)
    assert (note, ours) == ("unreadable", "") and "<U1" in theirs


def test_a_complex_file_counts_as_all_its_parts(trees: tuple[Path, Path]) -> None:
    a, b = trees
    left, right = (random(50, seed=seed) + 1j * random(50, seed=seed + 1) for seed in (5, 7))
    put(a, name(1, "fft"), left)
    put(b, name(1, "fft"), right)
    check(a, b)
    (row,) = [row for row in table(a) if row["tensor_name"] == name(1, "fft")]
    parts = np.concatenate([left.real.ravel(), left.imag.ravel()]).astype(np.float64)
    both = np.vdot(left, right) / (np.linalg.norm(left) * np.linalg.norm(right))
    assert float(row["meanA"]) == pytest.approx(parts.mean()) and float(row["varA"]) == pytest.approx(parts.var())
    assert float(row["cosine similarity"]) == pytest.approx(both.real, rel=1e-5)


def test_real_and_complex_files_are_left_out_of_the_table(trees: tuple[Path, Path]) -> None:
    a, b = trees
    for root in trees:
        put(root, name(0), random(3))
    put(a, name(1, "fft"), random(3))
    put(b, name(1, "fft"), random(3) * np.complex64(1 + 1j))
    assert check(a, b) == 1  # as `tensortap compare` ends, which compares them as complex numbers
    assert [row["tensor_name"] for row in table(a)] == [name(0)]
    assert notes(a) == [(name(1, "fft"), "complex", "float32", "complex64")]


# --- how it ends ---------------------------------------------------------------------------------------------------
def test_no_common_files(trees: tuple[Path, Path], capsys: Capsys) -> None:
    a, b = trees
    put(a, name(0), random(3))
    put(b, name(0, "another"), random(3))
    assert check(a, b) == 3
    assert "no file in common" in capsys.readouterr().err
    assert not (a / "tensors/compare_rst").exists()
    (empty := a.parent / "empty").mkdir()
    assert check(a, empty) == 3


def test_a_missing_path(trees: tuple[Path, Path], capsys: Capsys) -> None:
    put(trees[0], name(0), random(3))
    assert check(*trees) == 2
    assert f"{trees[1]} is not a folder" in capsys.readouterr().err


def cli(capsys: Capsys, monkeypatch: pytest.MonkeyPatch, *args: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["tensortap", "check-hooks", *map(str, args)])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        tensortap_main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_the_verb_does_the_same(trees: tuple[Path, Path], capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for root in trees:
        for index in range(50):
            put(root, name(index), random(3, seed=index))
    picture = trees[0].parent / "cosine.png"
    rc, out, _ = cli(capsys, monkeypatch, *trees, "--plot", "meanA", "--plot-out", picture)
    assert rc == 0
    assert re.search("[\u2801-\u28ff]", out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(table(trees[0])) == 50
    rc, out, _ = cli(capsys, monkeypatch, *trees, "--plot", "meanA", "--plot-out", picture, "--plot-over", "steps")
    assert rc == 0 and "meanA over micro steps" in out
    assert cli(capsys, monkeypatch, *trees, "--plot", "median")[0] == 2
    assert cli(capsys, monkeypatch, *trees, "--plot", "meanA", "--plot-over", "ranks")[0] == 2
    assert cli(capsys, monkeypatch, *trees, "--plot-out", picture)[0] == 2


# --- pictures ------------------------------------------------------------------------------------------------------
def test_columns_by_prefix() -> None:
    assert find_column("Cosine") == "cosine similarity"
    assert find_column("meanA") == "meanA"
    assert find_column("meana - meanb") == "meanA - meanB"
    for text in ("mean", "", "median"):
        with pytest.raises(UsageError, match="varA - varB"):
            find_column(text)


# --- the page about it ---------------------------------------------------------------------------------------------
def test_the_page_runs_as_written(tmp_path: Path) -> None:
    page = (Path(tensortap.__file__).parents[2] / "docs" / "saving-hook.md").read_text()
    script = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    commands = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0].splitlines()
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    ends = []
    for command in commands:
        words = command.partition("  #")[0].split()
        words = [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", *words]
        ends.append(subprocess.run(words, cwd=tmp_path, check=False, capture_output=True).returncode)
    assert ends == [1, 1, 1, 1]  # all of them say that they diverge
    assert len(table(tmp_path / "tmp_tensors")) == 9
    assert len(table(tmp_path / "tmp_tensors", "grads")) == 18
    assert (tmp_path / "cosine.png").exists()

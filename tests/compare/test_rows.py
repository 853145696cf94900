"""One wrong row among many right ones: a token, a channel. The whole tensor's error does not show it."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from made_runs import Array, Seen, chain, values, write

import tensortap as tt
from tensortap.cli import main
from tensortap.pytest_plugin import assert_runs_match

SHAPE = (64, 512, 32)


def one_row_off(reference: Array, factor: float = 1.001, at: tuple[int, ...] = (17, 203)) -> Array:
    candidate = reference.copy()
    candidate[at] = (candidate[at].astype(np.float32) * np.float32(factor)).astype(reference.dtype)
    return candidate


def runs(path: Path, reference: Array, candidate: Array, keep: bool = True) -> tuple[Path, Path]:
    before = Seen("fc1", values(1), "input")
    ours = write(path / "a", [before, Seen("fc1", reference, keep=keep)])
    return ours, write(path / "b", [before, Seen("fc1", candidate, keep=keep)])


def test_it_is_found_and_named(tmp_path: Path) -> None:
    reference = values(2, SHAPE)
    result = tt.compare(*runs(tmp_path, reference, one_row_off(reference, 1.0002)))
    assert result.verdict == "diverged"
    assert result.first.only_a_row
    assert result.first.rel_l2 < result.first.tolerance
    assert result.first.difference.row_rel_l2 > result.first.row_tolerance
    assert str(result) == (
        "The runs part in fc1 (Linear): in step 0, its output 0 is off by 2.0e-4 (relative L2) in its row [17, 203], "
        "while its inputs match."
    )
    *_, row = result.rows
    assert (row["status"], row["birth"], row["row_index"]) == ("diverged", True, [17, 203])
    assert row["row_rel_l2"] == pytest.approx(2e-4, rel=1e-3)
    assert row["row_tolerance"] == 32 * row["tolerance"]


def test_what_it_takes_to_pass_is_what_its_row_takes(tmp_path: Path) -> None:
    reference = values(2, SHAPE)
    two = runs(tmp_path, reference, one_row_off(reference, 1.0002))
    look = tt.compare(*two, details=1).details[0]
    assert look.difference is not None and look.judged is not None
    assert look.judged > look.difference.rel_l2
    assert tt.compare(*two, rtol=look.judged * 1.0001).verdict == "match"
    assert tt.compare(*two, rtol=look.judged * 0.9999).verdict == "diverged"


def test_the_table_says_what_numpy_says(tmp_path: Path) -> None:
    reference = values(2, (9, 40, 6), np.float64)
    candidate = reference + 1e-3 * values(3, (9, 40, 6), np.float64)
    reference[3, 4] = 1e-6
    *_, row = tt.compare(*runs(tmp_path, reference, candidate)).rows
    sizes, off = np.linalg.norm(reference, axis=-1), np.linalg.norm(candidate - reference, axis=-1)
    errors = off / np.maximum(sizes, np.sqrt(np.square(sizes).mean()) / 8)
    assert row["row_rel_l2"] == pytest.approx(errors.max(), rel=1e-12)
    assert tuple(row["row_index"]) == np.unravel_index(errors.argmax(), errors.shape)


def test_noise_of_all_rows_is_none(tmp_path: Path) -> None:
    """Short dtypes: each element rounded one step further, which is a different share of each row."""
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float32):
        for shape in ((4096, 3), (512, 8), (300, 64)):
            reference = values(2, shape).astype(dtype)
            bits = reference.view(f"u{reference.itemsize}") + np.random.default_rng(3).integers(0, 2, shape)
            candidate = bits.astype(f"u{reference.itemsize}").view(dtype)
            folder = tmp_path / f"{np.dtype(dtype).name} {shape}"
            assert tt.compare(*runs(folder, reference, candidate)).verdict == "match", (dtype, shape)


def test_rows_that_are_nearly_zero_may_be_all_noise(tmp_path: Path) -> None:
    reference = values(2, (256, 64))
    reference[7] = 0
    candidate = reference.copy()
    candidate[7] = 1e-6 * values(3, (64,))
    assert tt.compare(*runs(tmp_path, reference, candidate)).verdict == "match"


def test_a_tolerance_of_ones_own_counts_for_rows(tmp_path: Path) -> None:
    reference = values(2, SHAPE)
    paths = runs(tmp_path, reference, one_row_off(reference, 1.5))
    assert tt.compare(*paths, rtol=0.02).verdict == "match"
    result = tt.compare(*paths, rtol=0.01)
    assert (result.verdict, result.first.only_a_row) == ("diverged", True)


def test_what_a_noisy_run_differs_by_counts_for_rows(tmp_path: Path) -> None:
    reference = values(2, SHAPE)
    paths = runs(tmp_path, reference, one_row_off(reference, 1.0002))
    again = write(
        tmp_path / "c", [Seen("fc1", values(1), "input"), Seen("fc1", one_row_off(reference, 1.0001, (3, 4)))]
    )
    assert tt.compare(*paths).verdict == "diverged"
    assert tt.compare(*paths, noise=[again]).verdict == "match"


def test_the_error_of_an_incoming_row_propagates(tmp_path: Path) -> None:
    """Two modules: the first makes the row wrong, the second only passes it on."""
    inside, after = values(2, SHAPE), values(3, SHAPE)
    first = Seen("fc1", values(1), "input")
    ours = [first, Seen("fc1", inside), Seen("fc2", inside, "input", tensor=1), Seen("fc2", after)]
    wrong = one_row_off(inside)
    theirs = [first, Seen("fc1", wrong), Seen("fc2", wrong, "input", tensor=1), Seen("fc2", one_row_off(after))]
    result = tt.compare(write(tmp_path / "a", ours), write(tmp_path / "b", theirs))
    assert [(birth.module, birth.key.kind) for birth in result.births] == [("fc1", "output")]
    assert result.counts == {"equal": 1, "diverged": 3}


def test_equal_estimated_and_reshaped_pairs(tmp_path: Path) -> None:
    for row in tt.compare(write(tmp_path / "a", chain()), write(tmp_path / "b", chain())).rows:
        assert (row["row_rel_l2"], row["row_index"]) == (0, None)
    reference = values(2)
    *_, row = tt.compare(*runs(tmp_path / "sketch", reference, reference + 1, keep=False)).rows
    assert (row["row_rel_l2"], row["row_index"]) == (None, None)
    *_, row = tt.compare(*runs(tmp_path / "shape", reference, values(2, (6, 4)))).rows
    assert (row["row_rel_l2"], row["row_index"]) == (None, None)


def test_every_report_tells_of_the_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = values(2, SHAPE)
    paths = [str(path) for path in runs(tmp_path, reference, one_row_off(reference))]
    outputs = {name: str(tmp_path / f"out.{name}") for name in ("csv", "json", "junit", "markdown", "parquet")}
    options = [word for name, path in outputs.items() for word in (f"--{name}", path)]
    monkeypatch.setattr("sys.argv", ["tensortap", "compare", *paths, *options])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "row 17,203 alone off by 1.0e-3" in capsys.readouterr().out
    first = json.loads(Path(outputs["json"]).read_text())["first"]
    assert first["row_index"] == [17, 203]
    assert first["row_rel_l2"] > first["row_tolerance"]
    header, *_, last = Path(outputs["csv"]).read_text().splitlines()
    assert dict(zip(header.split(","), last.split(","), strict=True))['"row_index"'] == '"17;203"'
    assert "Worst row: 1.0e-3 at index (17, 203) (up to 6.1e-5 allowed)" in Path(outputs["junit"]).read_text()
    assert "row 17,203 alone off by" in Path(outputs["markdown"]).read_text()
    with pytest.raises(AssertionError, match=r"Worst row: 1\.0e-3 at index \(17, 203\)"):
        assert_runs_match(*paths)

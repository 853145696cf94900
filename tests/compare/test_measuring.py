"""Differences of pairs: from whole tensors as NumPy computes it in float64, from summaries within their error bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from made_runs import Array, Seen, chain, values, write

import tensortap as tt
from tensortap.core import dtypes
from tensortap.core.records import Comparison

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
USUAL = {"float64": (1e-7, 1e-7), "float32": (1.3e-6, 1e-5), "float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5)}


def row_of(path: Path, reference: Array, candidate: Array, keep: tuple[bool, bool] = (True, True)) -> dict[str, Any]:
    """Return the one row of a comparison of two tensors; check that the verdict agrees with it."""
    result = result_of(path, reference, candidate, keep)
    (row,) = result.rows
    assert result.counts == {row["status"]: 1}
    return row


def result_of(path: Path, reference: Array, candidate: Array, keep: tuple[bool, bool] = (True, True)) -> Comparison:
    number = sum(1 for _ in path.iterdir())
    ours = write(path / f"{number} reference", [Seen("fc", reference, keep=keep[0])])
    theirs = write(path / f"{number} candidate", [Seen("fc", candidate, keep=keep[1])])
    return tt.compare(ours, theirs)


def close(found: float, expected: float, within: float = 1e-9) -> bool:
    return bool(np.isclose(found, expected, rtol=within, atol=within * 1e-3))


def places(array: Array) -> Any:
    """Which number of its dtype each element is: floats of one sign are in the order of their bits."""
    bits = array.view(np.dtype(f"i{array.itemsize}")).astype(object)
    return np.where(bits < 0, -(bits + 2 ** (8 * array.itemsize - 1)), bits)


def expected(r: Array, c: Array) -> dict[str, Any]:
    """The textbook's definitions."""
    ours, theirs = r.astype(np.float64), c.astype(np.float64)
    gap = np.abs(theirs - ours)
    at = np.unravel_index(int(gap.argmax()), gap.shape)
    norms = np.linalg.norm(ours), np.linalg.norm(theirs)
    return {
        "rel_l2": np.linalg.norm(gap) / norms[0],
        "cosine": (ours * theirs).sum() / norms[0] / norms[1],
        "max_abs": gap.max(),
        "max_abs_index": [int(i) for i in at],
        "reference_value": ours[at],
        "candidate_value": theirs[at],
    } | {
        f"{name}_{side}": function(array)
        for side, array in (("reference", ours), ("candidate", theirs))
        for name, function in (("mean", np.mean), ("std", np.std), ("var", np.var), ("l2", np.linalg.norm))
    }


def check(row: dict[str, Any], r: Array, c: Array) -> None:
    for name, value in expected(r, c).items():
        same = row[name] == value if name == "max_abs_index" else close(row[name], value)
        assert same, (name, row[name], value)
    assert (row["exact"], row["rel_l2_bar"]) == (True, 0.0)
    assert (row["dtype_reference"], row["dtype_candidate"]) == (dtypes.name_of(r.dtype), dtypes.name_of(c.dtype))
    assert row["shape_reference"] == row["shape_candidate"] == list(r.shape)


# --- whole tensors -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("shape", [(3, 50, 7), (70_001,), (1,), ()])
def test_floats_against_numpy(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    r = values(1, shape, np.float64)
    c = r * (1.6 + 0.3 * values(2, shape, np.float64))
    r, c = (np.asarray(side).astype(dtypes.numpy_dtype(name)) for side in (r, c))
    row = row_of(tmp_path, r, c)
    check(row, r, c)
    assert row["max_ulp"] == float(max(abs(a - b) for a, b in zip(places(r).flat, places(c).flat, strict=True)))
    assert row["status"] == "diverged"


@pytest.mark.parametrize("name", [name for name in dtypes.NAMES if name not in FLOATS])
def test_integers_bools_and_complex_numbers_against_numpy(tmp_path: Path, name: str) -> None:
    dtype = dtypes.numpy_dtype(name)
    r, c = (np.random.default_rng(seed).integers(0, 2 if name == "bool" else 100, (40, 5)) for seed in (1, 2))
    r, c = r.astype(dtype), c.astype(dtype)
    row = row_of(tmp_path, r, c)
    if dtype.kind == "c":  # counts as its real and imaginary parts side by side
        r, c = r + 1j * c, c + 1j * r
        row = row_of(tmp_path, r, c)
        parts = [np.stack([side.real, side.imag], -1) for side in (r, c)]
        assert close(row["rel_l2"], expected(*parts)["rel_l2"])
        assert close(row["max_abs"], expected(*parts)["max_abs"])
    else:
        check(row, r, c)
        assert row["max_ulp"] == row["max_abs"]
        assert row["mismatched"] == np.mean(r != c), "an integer is right or wrong"
    assert row["status"] == "diverged"


@pytest.mark.parametrize("name", USUAL)
def test_mismatched_elements(tmp_path: Path, name: str) -> None:
    rtol, atol = USUAL[name]
    r = values(1, (200, 30), np.float64)
    c = r + 3 * atol * values(2, r.shape, np.float64) + 2 * rtol * np.abs(r) * values(3, r.shape, np.float64)
    r, c = (side.astype(dtypes.numpy_dtype(name)) for side in (r, c))
    ours, theirs = r.astype(np.float64), c.astype(np.float64)
    share = np.mean(np.abs(theirs - ours) > atol + rtol * np.abs(ours))
    assert 0 < share < 1
    assert close(row_of(tmp_path, r, c)["mismatched"], share)


def test_mismatched_elements_by_a_tolerance_of_ones_own(tmp_path: Path) -> None:
    r, c = values(1), values(1) + values(2) * np.float32(0.1)
    ours, theirs = write(tmp_path / "a", [Seen("fc", r)]), write(tmp_path / "b", [Seen("fc", c)])
    (row,) = tt.compare(ours, theirs, rtol=0.05, atol=0.02).rows
    gap = np.abs(c.astype(np.float64) - r)
    assert close(row["mismatched"], np.mean(gap > 0.02 + 0.05 * np.abs(r.astype(np.float64))))
    assert 0 < row["mismatched"] < 1


@pytest.mark.parametrize("long", ["float32", "float64"])
@pytest.mark.parametrize("short", ["bfloat16", "float16", "float8_e4m3fn"])
def test_two_dtypes(tmp_path: Path, long: str, short: str) -> None:
    r = values(1, (90, 11)).astype(dtypes.numpy_dtype(long))
    c = r.astype(dtypes.numpy_dtype(short))
    row = row_of(tmp_path, r, c)
    check(row, r, c)
    assert row["max_ulp"] == 0, "rounded as well as can be"
    assert row["status"] == "close", "rounding to the shorter dtype is no mistake"
    back = row_of(tmp_path, c, r)
    check(back, c, r)
    assert (back["status"], back["max_ulp"]) == ("close", 0)
    further = c.astype(np.float32).copy()
    further[7, 3] += abs(further[7, 3])
    further = further.astype(c.dtype)
    assert row_of(tmp_path, r, further)["max_ulp"] == abs(places(c)[7, 3] - places(further)[7, 3]) > 1


def test_the_same_values_in_two_dtypes(tmp_path: Path) -> None:
    short = values(1).astype(ml_dtypes.bfloat16)
    row = row_of(tmp_path, short.astype(np.float32), short)
    assert (row["status"], row["rel_l2"], row["max_abs"]) == ("equal", 0, 0)


def test_one_bit(tmp_path: Path) -> None:
    r = values(1, (50, 40))
    c = r.copy()
    c[31, 17] = np.nextafter(c[31, 17], np.float32(np.inf))
    row = row_of(tmp_path, r, c)
    assert (row["status"], row["max_ulp"], row["max_abs_index"]) == ("close", 1, [31, 17])
    check(row, r, c)


def test_shapes_that_differ(tmp_path: Path) -> None:
    for keep in ((True, True), (False, False), (True, False)):
        for shape in ((6, 4), (24,), (4, 6, 1), (4, 5)):
            row = row_of(tmp_path, values(1), values(1, shape), keep)
            assert (row["status"], row["shape_reference"], row["shape_candidate"]) == ("shape", [4, 6], list(shape))
            assert row["rel_l2"] is None
    assert "has the shape 6×4 instead of 4×6" in str(result_of(tmp_path, values(1), values(1, (6, 4))))


# --- zero, NaN, Inf ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])
def test_zeros(tmp_path: Path, keep: bool) -> None:
    zeros, some = np.zeros(6, np.float32), values(1, (6,))
    both = (keep, keep)
    assert row_of(tmp_path, zeros, zeros, both)["status"] == "equal"
    signed = row_of(tmp_path, zeros, -zeros, both)
    assert (signed["status"], signed["rel_l2"], signed["cosine"]) == ("close", 0, 1)
    born = row_of(tmp_path, zeros, some, both)
    assert (born["status"], born["rel_l2"]) == ("diverged", np.inf)
    assert "is not zero where the reference's is" in str(result_of(tmp_path, zeros, some, both))
    gone = row_of(tmp_path, some, zeros, both)
    assert gone["status"] == "diverged"
    assert close(gone["rel_l2"], 1, 1e-6)


@pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_on_one_side(tmp_path: Path, bad: float, keep: bool) -> None:
    good = values(1)
    broken = good.copy()
    broken[2, 3] = bad
    nan, inf = int(np.isnan(bad)), int(np.isinf(bad))
    forth, back = row_of(tmp_path, good, broken, (keep, keep)), row_of(tmp_path, broken, good, (keep, keep))
    assert forth["status"] == back["status"] == "nonfinite"
    assert (forth["nan_reference"], forth["inf_reference"]) == (0, 0)
    assert (forth["nan_candidate"], forth["inf_candidate"]) == (nan, inf)
    assert (back["nan_reference"], back["inf_reference"]) == (nan, inf)
    if keep:
        assert forth["max_abs_index"] == back["max_abs_index"] == [2, 3]


def test_the_sentence_names_the_side_that_is_not_finite(tmp_path: Path) -> None:
    good, broken = values(1), values(1)
    broken[2, 3] = np.nan
    infinite = np.array([1, np.inf], np.float32)
    for keep in (True, False):
        assert "is not finite where the reference's is" in str(result_of(tmp_path, good, broken, (keep, keep)))
        assert "is finite where the reference's is not" in str(result_of(tmp_path, broken, good, (keep, keep)))
        assert "has other NaN or Inf than the reference's" in str(
            result_of(tmp_path, infinite, -infinite, (keep, keep))
        )


@pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])
def test_not_finite_on_both_sides_alike(tmp_path: Path, keep: bool) -> None:
    """A -inf in a mask is not a mistake, and the other elements still count."""
    r = values(1)
    r[0], r[1, 0] = -np.inf, np.nan
    c = r.copy()
    assert row_of(tmp_path, r, c, (keep, keep))["status"] == "equal"
    c[2, 2] += np.float32(1e-7)
    near = row_of(tmp_path, r, c, (keep, keep))
    assert near["status"] == "close"
    c[2, 2] += 1
    far = row_of(tmp_path, r, c, (keep, keep))
    assert far["status"] == "diverged"
    finite = np.isfinite(r)
    truth = expected(r[finite], c[finite])["rel_l2"]
    assert abs(far["rel_l2"] - truth) <= max(far["rel_l2_bar"], 1e-9)


def test_nothing_is_finite(tmp_path: Path) -> None:
    nothing = np.full(5, np.nan, np.float32)
    assert row_of(tmp_path, nothing, nothing)["status"] == "equal"
    assert row_of(tmp_path, nothing, np.full(5, np.inf, np.float32))["status"] == "nonfinite"


def test_infinities_of_the_other_sign(tmp_path: Path) -> None:
    r = values(1)
    r[0, 0] = np.inf
    c = r.copy()
    c[0, 0] = -np.inf
    for keep in (True, False):
        assert row_of(tmp_path, r, c, (keep, keep))["status"] == "nonfinite"


def test_as_many_nans_elsewhere(tmp_path: Path) -> None:
    r = np.ones((4, 4), np.float32)
    c = r.copy()
    r[0, 0] = c[3, 3] = np.nan
    assert row_of(tmp_path, r, c)["status"] == "nonfinite"


@pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])
def test_tensors_of_no_elements(tmp_path: Path, keep: bool) -> None:
    row = row_of(tmp_path, np.empty((0, 3), np.float32), np.empty((0, 3), np.float32), (keep, keep))
    assert row["status"] == "equal"
    other = row_of(tmp_path, np.empty((0, 3), np.float32), np.empty((0, 3), np.float64), (keep, keep))
    assert other["status"] in ("equal", "close")


# --- summaries -----------------------------------------------------------------------------------------------------
def noisy(count: int) -> list[tuple[Array, Array]]:
    """Tensors of many kinds and the same with errors from 1e-5 to 1: even, in one channel, in a few elements."""
    rng = np.random.default_rng(5)
    found = []
    for number in range(count):
        shape = [(64, 48), (4000,), (3, 5, 7, 11), (300,)][number % 4]
        r = rng.normal(0, 1, shape)
        if number % 3 == 1:
            r[..., 0] *= 50
        error = rng.normal(0, 1, shape)
        if number % 5 == 1:
            error *= rng.random(shape) < 0.05
        if number % 5 == 2:
            error = r * 1.0
        size = 10 ** rng.uniform(-5, 0) * np.linalg.norm(r) / max(np.linalg.norm(error), 1e-9)
        found.append((r.astype(np.float32), (r + size * error).astype(np.float32)))
    return found


@pytest.mark.parametrize("keep", [(False, False), (True, False), (False, True)], ids=["both", "candidate", "reference"])
def test_the_estimate_is_within_its_bar(tmp_path: Path, keep: tuple[bool, bool]) -> None:
    """If one side has no tensors, the sketches decide."""
    pairs = noisy(240)
    ours = write(tmp_path / "a", [Seen(f"m{n}", r, keep=keep[0]) for n, (r, _) in enumerate(pairs)])
    theirs = write(tmp_path / "b", [Seen(f"m{n}", c, keep=keep[1]) for n, (_, c) in enumerate(pairs)])
    inside, angles = [], []
    for (r, c), row in zip(pairs, tt.compare(ours, theirs).rows, strict=True):
        truth = expected(r, c)
        assert not row["exact"]
        assert row["max_abs"] is row["max_ulp"] is row["mismatched"] is None
        assert 0 < row["rel_l2_bar"] < 0.2 * row["rel_l2"] + 1e-6
        inside.append(abs(row["rel_l2"] - truth["rel_l2"]) <= row["rel_l2_bar"])
        angles.append(abs((1 - row["cosine"]) - (1 - truth["cosine"])) <= 0.3 * (1 - truth["cosine"]) + 1e-6)
        for name in ("mean", "std", "var", "l2"):  # the moments are exact
            for side in ("reference", "candidate"):
                assert close(row[f"{name}_{side}"], truth[f"{name}_{side}"], 1e-6)
    assert np.mean(inside) >= 0.95
    assert np.mean(angles) >= 0.9


@pytest.mark.parametrize("keep", [(True, True), (False, False), (True, False), (False, True)])
def test_the_judgement_is_the_same_for_summaries_and_tensors(tmp_path: Path, keep: tuple[bool, bool]) -> None:
    ours = [Seen(s.module, s.array, s.kind, keep=keep[0]) for s in chain()]
    theirs = [Seen(s.module, s.array, s.kind, keep=keep[1]) for s in chain(off={"fc2": 0.01})]
    result = tt.compare(write(tmp_path / "a", ours), write(tmp_path / "b", theirs))
    assert (result.first.module, result.first.key.kind) == ("fc2", "output")
    assert result.counts == {"equal": 5, "diverged": 1}
    assert result.first.difference.exact == all(keep)
    assert ("about" in str(result)) != all(keep)
    assert any("estimated from sketches" in note for note in result.notes) != all(keep)


def test_some_tensors_kept_and_some_not(tmp_path: Path) -> None:
    ours = write(tmp_path / "a", [Seen(f"m{n}", values(n), keep=n % 2 == 0) for n in range(6)])
    theirs = write(tmp_path / "b", [Seen(f"m{n}", values(n) * np.float32(1.01), keep=n % 3 == 0) for n in range(6)])
    found = [row["exact"] for row in tt.compare(ours, theirs).rows]
    assert found == [n % 6 == 0 for n in range(6)]


# --- equal ---------------------------------------------------------------------------------------------------------
def test_equal_digests_are_never_measured(tmp_path: Path) -> None:
    """Their bytes are not even looked for."""
    ours, theirs = write(tmp_path / "a", chain()), write(tmp_path / "b", chain())
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    result = tt.compare(ours, theirs)
    assert (result.verdict, result.counts) == ("match", {"equal": 6})
    assert str(result) == "The runs match: all 6 pairs are equal bit for bit."
    for row in result.rows:
        assert (row["rel_l2"], row["cosine"], row["max_abs"], row["max_ulp"], row["mismatched"]) == (0, 1, 0, 0, 0)
        assert (row["exact"], row["rule"]) == (True, "bitwise")


@pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])
def test_a_run_compared_with_itself_is_clean(tmp_path: Path, keep: bool) -> None:
    seen = [Seen(f"m{n}", np.asarray(values(n, (5, 3), np.float64)), keep=keep) for n in range(3)]
    seen += [Seen(name, values(1, (9,)).astype(dtypes.numpy_dtype(name)), keep=keep) for name in FLOATS]
    seen += [Seen("nan", np.array([np.nan, np.inf, 1]), keep=keep), Seen("none", np.empty((0, 2)), keep=keep)]
    run = write(tmp_path / "a", seen)
    result = tt.compare(run, run)
    assert (result.verdict, result.first, result.births, result.unmatched) == ("match", None, [], [])
    assert result.counts == {"equal": len(seen)}


@pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])
def test_the_other_way_round(tmp_path: Path, keep: bool) -> None:
    ours = [Seen(f"m{n}", values(n), keep=keep) for n in range(8)]
    theirs = [Seen(f"m{n}", values(n) + np.float32(n % 3 * 1e-3), keep=keep) for n in range(1, 9)]
    runs = write(tmp_path / "a", ours), write(tmp_path / "b", theirs)
    forth, back = tt.compare(*runs), tt.compare(*runs[::-1])
    assert forth.verdict == back.verdict == "diverged"
    assert [r["module"] for r in forth.rows] == [r["module"] for r in back.rows]
    for one, other in zip(forth.rows, back.rows, strict=True):
        assert (one["status"], one["max_abs"], one["max_abs_index"]) == tuple(
            other[name] for name in ("status", "max_abs", "max_abs_index")
        )
        assert (one["reference_value"], one["l2_reference"]) == (other["candidate_value"], other["l2_candidate"])
        if one["cosine"] is not None:
            assert close(one["cosine"], other["cosine"])
    swap = {"reference": "candidate", "candidate": "reference"}
    assert {(u.side, u.key) for u in forth.unmatched} == {(swap[u.side], u.key) for u in back.unmatched}


def test_numbers_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    ours, theirs = write(tmp_path / "a", chain()), write(tmp_path / "b", chain(off={"fc1": 0.1, "fc3": 0.1}))
    assert tt.compare(ours, theirs, workers=1).table.equals(tt.compare(ours, theirs, workers=2).table)


def test_progress_goes_to_the_end(tmp_path: Path) -> None:
    ours, theirs = write(tmp_path / "a", chain()), write(tmp_path / "b", chain(off={"fc1": 0.1, "fc3": 0.1}))
    reported: list[tuple[int, int]] = []
    tt.compare(ours, theirs, progress=lambda done, whole: reported.append((done, whole)))
    assert reported[-1] == (2 * 2 * 24 * 4, 2 * 2 * 24 * 4), (
        "two pairs of 24 float32, both sides; equal ones cost nothing"
    )

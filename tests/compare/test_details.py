"""Details: which pairs are inspected, and with which results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from made_runs import Seen, chain, values, write

import tensortap as tt
from tensortap.compare.comparing import open_comparison
from tensortap.compare.details import pairs as pair_details
from tensortap.compare.details.pairs import PairDetails, choose_pairs
from tensortap.compare.options import ComparisonOptions
from tensortap.core.details import Window
from tensortap.core.records import Comparison
from tensortap.errors import UsageError

Opened = tuple[Comparison, PairDetails]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    write(tmp_path / "a", chain())
    write(tmp_path / "b", chain(off={"fc2": 0.5}))
    with ExitStack() as stack:
        yield open_comparison(tmp_path / "a", tmp_path / "b", ComparisonOptions(), stack)


def test_there_are_no_details_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", chain())
    write(tmp_path / "b", chain(off={"fc2": 0.5}))

    def never(*_: object) -> None:
        raise AssertionError("somebody looked")

    monkeypatch.setattr(pair_details, "inspect_pair", never)
    assert tt.compare(tmp_path / "a", tmp_path / "b").details == ()


def test_births_come_first_with_their_measures(tmp_path: Path) -> None:
    write(tmp_path / "a", chain())
    write(tmp_path / "b", chain(off={"fc2": 0.5}))
    result = tt.compare(tmp_path / "a", tmp_path / "b", details=3)
    assert len(result.details) == 3
    first = result.details[0]
    row = list(result.rows)[first.row]
    assert row["birth"]
    assert first.whole
    assert first.difference is not None
    assert first.difference.rel_l2 == row["rel_l2"]
    assert first.worst is not None
    assert first.worst[0].index == tuple(row["max_abs_index"])
    assert first.needed is not None
    assert first.needed.atol == row["max_abs"]
    assert first.reference.mean == pytest.approx(row["mean_reference"])
    assert first.candidate is not None
    assert first.candidate.max == pytest.approx(first.reference.max + 0.5)


def test_rows_of_the_same_two_tensors_share_a_look(tmp_path: Path) -> None:
    for name, off in (("a", 0.0), ("b", 0.5)):
        out = values(2) + np.float32(off)
        seen = [Seen("fc1", values(1), "input", tensor=0), Seen("fc1", out, tensor=1), Seen("", out, tensor=1)]
        write(tmp_path / name, seen)
    result = tt.compare(tmp_path / "a", tmp_path / "b", details=9)
    assert [detail.rows for detail in result.details] == [(1, 2), (0,)]


def test_from_summaries_there_are_both_summaries(tmp_path: Path) -> None:
    for name, off in (("a", 0.0), ("b", 0.5)):
        write(tmp_path / name, [Seen("fc", values(1) + np.float32(off), keep=name == "a")])
    with ExitStack() as stack:
        result, looks = open_comparison(tmp_path / "a", tmp_path / "b", ComparisonOptions(details=1), stack)
        found = result.details[0]
        assert not found.whole
        assert found.histogram is found.map is found.worst is None
        assert found.candidate is not None
        assert found.candidate.mean == pytest.approx(found.reference.mean + 0.5)
        assert found.difference is not None
        assert not found.difference.exact
        assert "candidate's tensor was kept" in looks.why_not(0)
        with pytest.raises(UsageError, match="keep="):
            looks.map(0, Window(0, 1, 0, 1))


def test_equal_pairs_have_zero_error(opened: Opened) -> None:
    comparison, looks = opened
    pair = next(at for at, row in enumerate(comparison.rows) if row["status"] == "equal")
    found = looks.detail(pair).difference
    assert found is not None
    assert (found.max_abs, found.max_ulp, found.mismatched, found.row_rel_l2) == (0, 0, 0, 0)


def test_a_tensor_that_cannot_be_read_is_described_by_its_summary(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, [Seen("fc", values(1)), Seen("fc", values(2), step=1)])
    lost = sorted((tmp_path / "b").rglob("*.safetensors"))[0]
    lost.unlink()
    result = tt.compare(tmp_path / "a", tmp_path / "b", details=2)
    assert {(detail.row, detail.whole, detail.damaged) for detail in result.details} == {
        (0, False, True),
        (1, True, False),
    }
    assert any(lost.name in note for note in result.notes)


def test_pairs_of_different_shapes_are_not_inspected(tmp_path: Path) -> None:
    write(tmp_path / "a", [Seen("fc", values(1, (2, 3)))])
    write(tmp_path / "b", [Seen("fc", values(1, (3, 2)))])
    result = tt.compare(tmp_path / "a", tmp_path / "b", details=1)
    found = result.details[0]
    assert not found.whole
    assert (found.reference.shape, found.candidate and found.candidate.shape) == ((2, 3), (3, 2))
    assert "shapes differ" in found.why


def test_all_details_together_have_a_limit_of_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", chain())
    write(tmp_path / "b", chain(off={"fc1": 0.5, "fc2": 0.5}))
    monkeypatch.setattr(pair_details, "MOST_ELEMENTS", 30)
    found = tt.compare(tmp_path / "a", tmp_path / "b", details=4).details
    assert [detail.whole for detail in found] == [True, False, False, False]
    assert all("too large" in detail.why for detail in found[1:])


def test_any_pair_can_be_asked_for_while_the_runs_are_open(opened: Opened) -> None:
    comparison, looks = opened
    last = len(comparison) - 1
    assert looks.detail(last).whole
    whole, window, (ours, theirs) = looks.values(3, Window(0, 3, 0, 99))
    assert (whole, window) == ((1, 24), (0, 1, 0, 24))
    np.testing.assert_allclose(theirs - ours, 0.5, rtol=1e-6)
    assert looks.map(3, Window(0, 2, 0, 2)).tiles == pytest.approx(0.5)


def test_the_users_own_tolerance_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "a", chain())
    write(tmp_path / "b", chain(off={"fc2": 0.5}))
    found = tt.compare(tmp_path / "a", tmp_path / "b", details=1, rtol=0.25).details[0]
    assert found.tolerances is not None
    assert found.tolerances[0] == 0.25


def test_a_comparison_knows_the_options_it_was_made_with(tmp_path: Path) -> None:
    for name in ("a", "b", "a2"):
        write(tmp_path / name, chain(steps=(0, 1)))
    assert tt.compare(tmp_path / "a", tmp_path / "b", steps=[0]).options == []
    asked = {"rename": ["x=y"], "rtol": 0.5, "noise": [tmp_path / "a2"], "steps": {0: 1}}
    reported = tt.compare(tmp_path / "a", tmp_path / "b", **asked).options
    assert reported == ["--rename", "x=y", "--step", "0:1", "--rtol", "0.5", "--noise", str(tmp_path / "a2")]


def test_choosing_pairs() -> None:
    error = np.zeros(1000)
    error[500:] = 1e-3
    error[700], error[800], error[900] = 0.5, np.inf, np.nan
    chosen = choose_pairs([500, 650], error, np.full(1000, 1e-6), 40)
    assert chosen[:2] == [500, 650]
    assert {499, 501} <= set(chosen[:14])
    assert {700, 800} <= set(chosen)
    assert len(chosen) == len(set(chosen)) >= 40
    assert choose_pairs([], np.empty(0), np.empty(0), 10) == []
    equal = choose_pairs([], np.zeros(100), np.ones(100), 10)
    assert max(equal) == 99

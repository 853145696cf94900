"""Correct runs of many layouts match the run of one process; every record of it is compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from support.parallel_world import run_world
from tensortap.compare.join.source import JoinedSource

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"sizes": {"tp": 2}},
    "tp4": {"sizes": {"tp": 4}},
    "dp2": {"sizes": {"dp": 2}},
    "dp2 tp2": {"sizes": {"dp": 2, "tp": 2}},
    "cp2": {"sizes": {"cp": 2}},
    "cp2 zigzag": {"sizes": {"cp": 2}, "zigzag": True},
    "tp2 sequence parallel": {"sizes": {"tp": 2}, "sequence_parallel": True},
    "dp2 tp2 sequence parallel": {"sizes": {"dp": 2, "tp": 2}, "sequence_parallel": True},
    "dp2 cp2": {"sizes": {"dp": 2, "cp": 2}, "zigzag": True},
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_world(tmp_path_factory.mktemp("one") / "run", steps=1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_correct_run_matches_one_process(tmp_path: Path, one: Path, name: str) -> None:
    result = tt.compare(one, run_world(tmp_path / "b", steps=1, **LAYOUTS[name]))
    assert result.verdict == "match", result.sentence
    assert len(result) == len(tt.open(one)) and not result.unmatched
    assert not result.counts.get("unjudged") and result.births == []


@pytest.mark.parametrize("name", ["dp2 tp2", "cp2 zigzag", "tp2 sequence parallel"])
def test_summaries_alone_suffice(tmp_path: Path, one: Path, name: str) -> None:
    result = tt.compare(one, run_world(tmp_path / "b", steps=1, keep=False, **LAYOUTS[name]))
    assert result.verdict == "match", result.sentence
    assert len(result) == len(tt.open(one)) and not result.counts.get("unjudged")


def test_both_sides_may_have_any_layout(tmp_path: Path) -> None:
    tp = run_world(tmp_path / "a", {"tp": 2}, steps=1)
    dp = run_world(tmp_path / "b", {"dp": 2}, steps=1, keep=False)
    for result in (tt.compare(tp, dp), tt.compare(dp, tp)):
        assert result.verdict == "match", result.sentence
        assert any("2 ranks (tp 2) were joined" in note for note in result.notes)


def test_parameters_and_forward_records_keep_their_digests(tmp_path: Path, one: Path) -> None:
    """Joining adds up digests, so what is computed alike is known to be equal bit for bit."""
    result = tt.compare(one, run_world(tmp_path / "b", {"dp": 2}, steps=1))
    rows = {(row["module"], row["kind"], row["path"], row["call"]): row["status"] for row in result.rows}
    start = [status for (_, kind, _, call), status in rows.items() if kind == "param" and call == 0]
    assert start and set(start) == {"equal"}
    assert {status for (_, kind, _, _), status in rows.items() if kind in ("input", "output")} == {"equal"}


def test_a_factor_of_the_loss_is_a_note(tmp_path: Path, one: Path) -> None:
    result = tt.compare(one, run_world(tmp_path / "b", {"dp": 2}, steps=1))
    assert any("gradients are 2 times the reference's before they are reduced" in note for note in result.notes)


def test_the_joined_whole_has_the_bytes_of_the_reference(tmp_path: Path, one: Path) -> None:
    """Blocks of four ranks, in two directions, and fused parts."""
    joined = tt.store.Run(JoinedSource(tt.open(run_world(tmp_path / "b", {"dp": 2, "tp": 2}, steps=1))))
    reference = tt.open(one)
    compared = 0
    for record in joined.records(kind="param", call=0):
        other = reference.get(record.key)
        assert other is not None and record.shape == other.shape
        np.testing.assert_array_equal(joined.load(record), reference.load(other))
        compared += 1
    assert compared > 20


def lost(path: Path, rank: int) -> Path:
    for file in sorted((path / f"rank_{rank}").iterdir()):
        file.unlink()
    (path / f"rank_{rank}").rmdir()
    return path


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}], ids=["shards", "replicas"])
def test_a_rank_that_left_nothing_is_no_match(tmp_path: Path, one: Path, sizes: Mapping[str, int]) -> None:
    result = tt.compare(one, lost(run_world(tmp_path / "b", sizes, steps=1), 1))
    assert result.verdict == "incomparable" and result.first is None
    assert "1 of the candidate's 2 ranks left no record" in result.sentence
    assert "are held by no rank" in result.sentence and any(each.why for each in result.unmatched)


def test_selected_ranks_are_compared_one_by_one(tmp_path: Path, one: Path) -> None:
    """A part is not compared with a whole, and never called a match."""
    b = run_world(tmp_path / "b", {"tp": 2}, steps=1)
    assert tt.compare(b, run_world(tmp_path / "c", {"tp": 2}, steps=1), ranks=[1]).verdict == "match"
    result = tt.compare(one, b, ranks=[0])
    assert result.verdict == "incomparable" and "another part of the whole" in result.sentence


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"micros": 4}, {"sizes": {"dp": 2}}),
        ({}, {"sizes": {"dp": 2}, "micros": 2}),
        ({"sizes": {"tp": 2}, "micros": 2}, {}),
    ],
    ids=["micro batches and ranks", "both on one side", "the reference has more"],
)
def test_micro_batches_are_an_axis_like_any_other(tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    result = tt.compare(run_world(tmp_path / "a", steps=1, **ours), run_world(tmp_path / "b", steps=1, **theirs))
    assert result.verdict == "match", result.sentence
    assert len(result) == 218 and not result.counts.get("unjudged")
    assert {each.key.module for each in result.unmatched} <= {"position"}  # its values have no batch


def test_a_mistake_in_micro_batches_is_found(tmp_path: Path, one: Path) -> None:
    mistake = ["no_reduce:layers.1.mlp.down"]
    result = tt.compare(one, run_world(tmp_path / "b", {"tp": 2}, mistake, steps=1, micros=2))
    assert result.first is not None and result.first.module == "layers.1.mlp.down"

"""Replicas vote: the odd one is named, in a comparison and in one run alone, whatever is known of placements."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensortap as tt
from support.parallel_world import run_world
from support.slicing import Array, Held, partial, replica, slice_run
from tensortap.cli import main
from tensortap.core.placement import GUESS, Mesh, Placement
from tensortap.core.records import Record

STATE = ("param", "buffer")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_world(tmp_path_factory.mktemp("one") / "run", steps=1, kinds=STATE)


def exit_code(*argv: object) -> int:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr("sys.argv", ["tensortap", *map(str, argv), "--quiet"])
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("placed", [True, False], ids=["placed", "unplaced"])
def test_a_flipped_bit_is_named(tmp_path: Path, one: Path, rank: int, placed: bool) -> None:
    """Of two replicas, the reference decides."""
    mistake = f"flip:layers.1.norm1.weight@{rank}"
    b = run_world(tmp_path / "b", {"dp": 2}, [mistake], steps=1, kinds=STATE, placed=placed, keep=False)
    result = tt.compare(one, b)
    assert result.verdict == "diverged" and exit_code("compare", one, b) == 1
    assert result.sentence.startswith(f"Rank {rank} of 2 replicas of layers.1.norm1.weight differs since step 0: ")


@pytest.mark.parametrize("placed", [True, False], ids=["placed", "unplaced"])
def test_right_replicas_match(tmp_path: Path, one: Path, placed: bool) -> None:
    b = run_world(tmp_path / "b", {"dp": 2}, steps=1, kinds=STATE, placed=placed)
    assert tt.compare(one, b).verdict == "match" and tt.health(b).verdict == "healthy"


def test_the_majority_decides_in_one_run_alone(tmp_path: Path) -> None:
    b = run_world(tmp_path / "b", {"dp": 4}, ["flip:layers.1.norm1.weight@2"], steps=2, kinds=STATE)
    report = tt.health(b)
    assert report.verdict == "suspicious" and exit_code("health", b) == 1
    assert report.sentence.startswith("Rank 2 of 4 replicas of layers.1.norm1.weight differs since step 0: ")
    assert (report.births[0].status, report.births[0].rank) == ("replica", 2)


def test_two_replicas_without_a_reference_are_both_named(tmp_path: Path) -> None:
    report = tt.health(run_world(tmp_path / "b", {"dp": 2}, ["flip:layers.1.norm1.weight@1"], steps=1, kinds=STATE))
    assert "Rank 1 of 2 replicas of layers.1.norm1.weight differs since step 0" in report.sentence
    assert "that of rank 0, and neither has a majority" in report.sentence


def test_since_which_step_a_replica_differs(tmp_path: Path) -> None:
    report = tt.health(run_world(tmp_path / "b", {"dp": 4}, ["stale:layers.1@3"], steps=3, kinds=STATE, keep=False))
    assert report.sentence.startswith("Rank 3 of 4 replicas of layers.1.mean differs since step 1: ")
    assert "it still holds the value from before step 1, unlike ranks 0, 1, 2" in report.sentence


@pytest.mark.parametrize("kind", ["param_grad", "param"])
def test_only_gradients_that_are_guessed_to_be_replicas_may_be_summands(tmp_path: Path, kind: str) -> None:
    one = run_world(tmp_path / "one", steps=1, kinds=("param", "param_grad"))

    def cut(record: Record, array: Array, mesh: Mesh) -> Held:
        if (record.key.kind, record.key.module) != (kind, "layers.1.norm1"):
            return replica(array, "tp")
        return partial(array, mesh, "tp")[0], Placement.of_whole(array.shape, {"tp": "replica"}, GUESS)

    report = tt.health(slice_run(one, tmp_path / "b", {"tp": 2}, cut))
    assert report.verdict == ("healthy" if kind == "param_grad" else "suspicious"), report.sentence
    assert any("they may be summands" in note for note in report.notes) == (kind == "param_grad")


@pytest.mark.parametrize("rank", [1, 3])
def test_the_reference_decides_between_replicas_of_a_shard(tmp_path: Path, one: Path, rank: int) -> None:
    """Digests and sketches of the other shards and of the right replica add up to those of the reference."""
    mistake = f"flip:layers.1.mlp.down.weight@{rank // 2},{rank % 2}"
    b = run_world(tmp_path / "b", {"dp": 2, "tp": 2}, [mistake], steps=1, kinds=STATE, keep=False)
    result = tt.compare(one, b)
    assert result.sentence.startswith(f"Rank {rank} of 2 replicas of layers.1.mlp.down.weight differs since step 0: ")
    assert "neither has a majority" not in result.sentence

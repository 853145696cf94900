"""Ranks without placements: what can be told is judged, the rest is named, and nothing of it is a match."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensortap as tt
from support.parallel_world import run_world


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_world(tmp_path_factory.mktemp("one") / "run", steps=1)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}], ids=["tp", "dp"])
def test_summaries_of_unknown_parts_are_open(tmp_path: Path, one: Path, sizes: dict[str, int]) -> None:
    result = tt.compare(one, run_world(tmp_path / "b", sizes, steps=1, placed=False, keep=False))
    assert result.verdict == "incomparable" and result.first is None
    assert "could not be judged (the layout over ranks is not known)" in result.sentence


def test_bytes_of_consecutive_parts_are_joined_by_a_guess(tmp_path: Path, one: Path) -> None:
    result = tt.compare(one, run_world(tmp_path / "b", {"dp": 2}, steps=1, placed=False))
    assert result.verdict == "match", result.sentence
    assert any("is a guess" in note for note in result.notes)


def test_it_is_said_how_to_give_a_layout(tmp_path: Path, one: Path) -> None:
    result = tt.compare(one, run_world(tmp_path / "b", {"tp": 2}, steps=1, placed=False))
    assert result.verdict == "incomparable"
    assert any("layout= of tensortap.capture" in note for note in result.notes)


@pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])
def test_a_missing_reduction_is_named_by_its_sum(tmp_path: Path, one: Path, keep: bool) -> None:
    mistake = "no_reduce:layers.1.mlp.down"
    result = tt.compare(one, run_world(tmp_path / "b", {"tp": 2}, [mistake], steps=1, placed=False, keep=keep))
    assert result.first is not None and result.first.cause.value == "missing_reduction"
    assert result.first.module == "layers.1.mlp.down"

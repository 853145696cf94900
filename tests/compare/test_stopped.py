"""A recording that stopped early does not match a whole one: the rest was never recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.capture import recorder
from tensortap.cli import app


def record(path: Path, fails_at: int | None = None, scale: float = 1.0, steps: int = 3) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with tt.capture(model, path) as tap, pytest.MonkeyPatch.context() as patch:
        for step in range(steps):
            if step == fails_at:

                def fail(array: object) -> None:
                    raise MemoryError("no room for a summary")

                patch.setattr(recorder, "summarize", fail)
            model(scale * torch.ones(2, 4)).sum().backward()
            tap.step()
    return path


@pytest.mark.parametrize("failed", ["reference", "candidate"])
def test_a_matching_part_is_not_a_match_of_the_runs(tmp_path: Path, failed: str) -> None:
    paths = {side: record(tmp_path / side, 1 if side == failed else None) for side in ("reference", "candidate")}
    result = tt.compare(paths["reference"], paths["candidate"])
    assert result.verdict == "incomparable"
    assert f"the recording of the {failed} stopped early (no room for a summary)" in result.sentence
    assert "Everything that was compared matches" in result.sentence


def test_the_exit_code(tmp_path: Path) -> None:
    whole, part = record(tmp_path / "whole"), record(tmp_path / "part", fails_at=1)
    with pytest.raises(SystemExit) as left:
        app(["compare", str(whole), str(part)])
    assert left.value.code == 3


def test_a_divergence_before_the_end_stays_one(tmp_path: Path) -> None:
    result = tt.compare(record(tmp_path / "whole"), record(tmp_path / "part", fails_at=1, scale=1.5))
    assert result.verdict == "diverged"


def test_two_that_stopped_alike_match(tmp_path: Path) -> None:
    assert tt.compare(record(tmp_path / "a", 1), record(tmp_path / "b", 1)).verdict == "match"

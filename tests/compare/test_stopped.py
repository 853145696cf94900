"""A run that is not whole does not match a whole one: the rest was never recorded, or cannot be read."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest
import torch
from made_runs import chain, write
from torch import nn

import tensortap as tt
from tensortap.cli import app
from tensortap.store.exports.export import export


def record(path: Path, fails_at: int | None = None, scale: float = 1.0, steps: int = 3) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with tt.capture(model, path) as tap:
        for step in range(steps):
            if step == fails_at:

                def fail(*args: object, **options: object) -> None:
                    raise MemoryError("no room for a summary")

                tap._watcher.destination.take = fail
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


@pytest.mark.parametrize("format", ["npy", "hdf5"])
def test_tensors_that_cannot_be_read_are_not_called_a_match(tmp_path: Path, format: str) -> None:
    run, copy = write(tmp_path / "run", chain()), tmp_path / f"copy.{format}"
    export(tt.open(run), format, copy)
    assert tt.compare(run, copy).verdict == "match"
    if format == "npy":
        next(copy.rglob("*.npy")).write_bytes(b"torn")
    else:
        with h5py.File(copy, "r+") as file:
            names: list[str] = []
            file.visit(lambda name: names.append(name) if isinstance(file[name], h5py.Dataset) else None)
            attributes = dict(file[names[0]].attrs)
            del file[names[0]]
            file.create_dataset(names[0], (1 << 36,), "f4", chunks=(1024,)).attrs.update(attributes)
    result = tt.compare(run, copy)
    assert result.verdict == "incomparable"
    assert "1 tensor of the candidate cannot be read" in str(result)

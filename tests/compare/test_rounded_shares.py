"""Mixed precision over several ranks: each rounds its share of a gradient, which may differ by that much."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from support.slicing import Array, Cut, Held, replica, shard, slice_run
from tensortap.core.placement import Mesh
from tensortap.core.records import Record

KINDS = ("input", "output", "grad_output", "param", "param_grad", "step_grad")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step in mixed precision: gradients of float32, computed in bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    path = tmp_path_factory.mktemp("one") / "run"
    with tt.capture(model, path, optimizer=optimizer, kinds=KINDS, keep="tensors"):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.randn(8, 16))
        output.float().square().mean().backward()
        optimizer.step()
    return path


def divided(noise: float) -> Cut:
    """Two data-parallel ranks, whose gradients of parameters are off by some noise."""

    def cut(record: Record, array: Array, mesh: Mesh) -> Held:
        if record.key.kind in ("input", "output", "grad_output"):
            return shard(array, 0, mesh, "dp")
        if record.key.kind in ("param_grad", "step_grad"):
            off = np.random.default_rng(record.seq).normal(0, noise, array.shape)
            return replica((array * (1 + off)).astype(array.dtype), "dp")
        return replica(array, "dp")

    return cut


@pytest.mark.parametrize(("noise", "verdict"), [(2.0**-9, "match"), (0.2, "diverged")])
def test_shares_may_be_rounded_in_the_shorter_dtype(tmp_path: Path, one: Path, noise: float, verdict: str) -> None:
    result = tt.compare(one, slice_run(one, tmp_path / "two", {"dp": 2}, divided(noise)))
    assert result.verdict == verdict, result.sentence
    rules = {row["rule"] for row in result.rows if row["kind"] == "param_grad" and row["status"] == "close"}
    assert rules <= {"each rank rounds its share of a sum to a shorter dtype"} and bool(rules) == (verdict == "match")


def test_ranks_that_divide_the_batch_alike_round_alike(tmp_path: Path, one: Path) -> None:
    a = slice_run(one, tmp_path / "a", {"dp": 2}, divided(0.0))
    b = slice_run(one, tmp_path / "b", {"dp": 2}, divided(2.0**-6))
    assert tt.compare(a, b).verdict == "diverged"

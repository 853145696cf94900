"""Micro batches under FSDP2: its hooks see what was accumulated so far, those of one process each micro batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tt
from support.slicing import Array, Cut, Held, replica, shard, slice_run
from tensortap.core.placement import Mesh
from tensortap.core.records import Record

KINDS = ("input", "output", "param", "param_grad", "step_grad")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of two micro batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    path = tmp_path_factory.mktemp("one") / "run"
    with tt.capture(model, path, optimizer=optimizer, kinds=KINDS, keep="tensors"):
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return path


def gradients(run: Path) -> Mapping[tuple[str, str, int], Array]:
    opened = tt.open(run)
    records = opened.records(kind="param_grad")
    return {(each.key.module, each.key.path, each.key.micro): opened.load(each) for each in records}


def fully_sharded(run: Path, sync: bool = True, lost: bool = False, optimizer: bool = True) -> Cut:
    """Two ranks as FSDP2 has them. sync: it reduces after each micro batch. lost: the optimizer got only the last."""
    grads = gradients(run)

    def cut(record: Record, array: Array, mesh: Mesh) -> Held:
        key = record.key
        if key.kind in ("input", "output"):
            return shard(array, 0, mesh, "dp")
        if key.kind == "param":
            return replica(array, "dp")
        if (key.kind == "param_grad" and key.micro == 0 and not sync) or (key.kind == "step_grad" and not optimizer):
            return None
        last = grads[key.module, key.path, 1]
        first = 0 * last if lost else grads[key.module, key.path, 0]
        seen = array if key.micro == 0 and key.kind == "param_grad" else first + last
        local, placement = shard(seen, 0, mesh, "dp")
        return local, replace(placement, source="fsdp2")

    return cut


@pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])
@pytest.mark.parametrize("sync", [True, False])
def test_the_sum_is_compared_as_the_optimizer_got_it(tmp_path: Path, one: Path, sync: bool, keep: bool) -> None:
    two = slice_run(one, tmp_path / "two", {"dp": 2}, fully_sharded(one, sync), keep=keep)
    for result in (tt.compare(one, two), tt.compare(two, one)):
        assert result.verdict == "match", result.sentence
        assert any("4 gradients of later micro batches were not compared" in note for note in result.notes)
        named = {each.key.micro for each in result.unmatched if each.why}
        assert named == ({1} if sync else {0, 1})
        assert {row["kind"] for row in result.rows} == set(KINDS if sync else set(KINDS) - {"param_grad"})


def test_a_micro_batch_that_the_optimizer_did_not_get_is_found(tmp_path: Path, one: Path) -> None:
    two = slice_run(one, tmp_path / "two", {"dp": 2}, fully_sharded(one, lost=True))
    result = tt.compare(one, two)
    assert result.first is not None and result.first.key.kind == "step_grad", result.sentence


def test_nothing_is_concluded_from_sums_alone(tmp_path: Path, one: Path) -> None:
    alone = slice_run(
        one,
        tmp_path / "one",
        {"dp": 1},
        lambda record, array, mesh: None if record.key.kind in ("step_grad", "param") else (array, None),
    )
    two = slice_run(one, tmp_path / "two", {"dp": 2}, fully_sharded(one, optimizer=False))
    result = tt.compare(alone, two)
    assert result.verdict == "incomparable" and "accumulated up to there" in result.sentence

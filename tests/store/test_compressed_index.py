"""The index compresses, sketches fold to fewer sums, and runs of earlier formats stay readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from storing import record, same, write
from torch import nn

import tensortap as tt
from tensortap.core.sketches import fold, of_one_size
from tensortap.errors import RunUnreadable, UsageError
from tensortap.kernels import summarize
from tensortap.store import RunWriter


def batches_of(index: Path) -> list[Any]:
    return list(pa.ipc.open_stream(index.read_bytes()))


def uncompressed(path: Path) -> None:
    """Rewrite the index of a run with plain buffers, which readers of the format take as well."""
    index = path / "rank_0" / "index.arrows"
    batches = batches_of(index)
    schema = batches[0].schema
    rows = batches
    end = b"\xff\xff\xff\xff\x00\x00\x00\x00"
    index.write_bytes(schema.serialize().to_pybytes() + b"".join(each.serialize().to_pybytes() for each in rows) + end)


def test_an_uncompressed_index_reads_the_same(tmp_path: Path) -> None:
    for name in ("new", "old"):
        write(tmp_path / name, count=40)
    uncompressed(tmp_path / "old")
    with tt.open(tmp_path / "new") as new, tt.open(tmp_path / "old") as old:
        assert len(old) == 40 and old.finished and not old.notices
        assert all(same(left, right) for left, right in zip(new, old, strict=True))
        assert old.index(0).equals(new.index(0))
    assert (tmp_path / "new/rank_0/index.arrows").stat().st_size < (tmp_path / "old/rank_0/index.arrows").stat().st_size


def test_every_cut_of_a_compressed_index_leaves_its_whole_batches(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", info={}) as writer:
        for number in range(3):
            writer.append(record(number))
            writer.flush()
    index = tmp_path / "run" / "rank_0" / "index.arrows"
    whole = index.read_bytes()
    counts = set()
    for cut in (*range(0, len(whole), 97), len(whole) - 4):
        index.write_bytes(whole[:cut])
        with tt.open(tmp_path / "run") as run:
            found = list(run)
            assert [each.key.module for each in found] == [f"layers.{number}" for number in range(len(found))]
            assert all(same(each, record(number)) for number, each in enumerate(found))
            counts.add(len(found))
    assert counts == {0, 1, 2, 3}


def test_sketches_are_read_when_needed_and_their_damage_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "run", count=1)
    index = tmp_path / "run" / "rank_0" / "index.arrows"
    data = index.read_bytes()
    lz4 = b"\x04\x22\x4d\x18"
    begin = (256 * 4).to_bytes(8, "little") + lz4  # a compressed buffer begins with its size
    assert data.count(begin) == 1
    index.write_bytes(data.replace(begin, (256 * 4 + 1).to_bytes(8, "little") + lz4))
    with tt.open(tmp_path / "run") as run:
        assert run.columns(0).num_rows == 1
        with pytest.raises(RunUnreadable, match="its sketches cannot be read"):
            list(run)


@pytest.mark.parametrize("size", [128, 64, 32])
def test_a_folded_sketch_estimates_distances_within_its_error(size: int) -> None:
    random = np.random.default_rng(1)
    ratios = []
    for _ in range(60):
        left = random.standard_normal((40, 130)).astype(np.float32)
        left[:, 7] *= 300  # an outlier channel must not pile up in one bucket
        right = left * (1 + 1e-2 * random.standard_normal(left.shape)).astype(np.float32)
        sketches = [fold(summarize(each).sketch[None], size)[0] for each in (left, right)]
        ratios.append(np.linalg.norm(sketches[0] - sketches[1]) / np.linalg.norm(left - right))
    error = 1 / np.sqrt(2 * size)
    assert abs(np.mean(ratios) - 1) < error
    assert np.std(ratios) < 2 * error


def test_folding_refuses_what_does_not_divide() -> None:
    with pytest.raises(UsageError, match="256 buckets cannot be folded to 96"):
        fold(np.zeros((1, 256), np.float32), 96)
    with pytest.raises(UsageError, match="sketch: 100 is not a size"):
        tt.capture(nn.Linear(2, 2), sketch=100)
    wide, narrow = of_one_size([np.ones((2, 256), np.float32), np.ones((1, 64), np.float32)])
    assert wide.shape == (2, 64) and (wide == 4).all() and (narrow == 1).all()


def hundred_modules() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(19)]
    return nn.Sequential(nn.Embedding(100, 64), *blocks, nn.LayerNorm(64), nn.Linear(64, 100))


def train(path: Path | None, scale: float = 1.0, **options: Any) -> Any:
    model = hundred_modules()
    assert len(list(model.modules())) > 98
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with tt.capture(model, path, optimizer=optimizer, **options) as tap:
        for step in range(3):
            tokens = torch.arange(128).reshape(8, 16).mul(step + 3) % 100
            (scale * model(tokens).logsumexp(-1).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tap.run


def test_a_golden_run_of_a_hundred_modules_is_small_and_still_compares(tmp_path: Path) -> None:
    golden = train(tmp_path / "golden", sketch=32)
    assert sum(file.stat().st_size for file in (tmp_path / "golden").rglob("*")) < 500_000
    assert tt.compare(golden, train(None)).verdict == "match"
    other = tt.compare(golden, train(None, scale=1.01))
    assert other.verdict == "diverged" and other.first is not None
    assert other.first.key.phase == "backward"
    pairs = other.table.to_pydict()
    worst = pairs["rel_l2"][other.first.row]
    assert worst == pytest.approx(0.01, rel=0.3) and pairs["exact"][other.first.row] is False

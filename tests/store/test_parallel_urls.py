"""Runs of several ranks, and rings, in an object store."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
import torch

import tensortap as tt
from support.parallel_world import run_world
from support.s3_server import BUCKET, S3Server
from tensortap.core.records import Comparison
from tensortap.store.upload import upload

SIZES = {"dp": 2, "tp": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training in one process, as shards on four ranks, and once more with a mistake."""
    folder = tmp_path_factory.mktemp("runs")
    run_world(folder / "one", steps=1)
    run_world(folder / "sharded", SIZES, steps=1)
    run_world(folder / "mistake", SIZES, steps=1, mistakes=["no_reduce:layers.1.mlp.down"])
    return folder


def numbers(result: Comparison) -> tuple[object, ...]:
    return result.verdict, result.sentence, result.counts, result.table.drop_columns(["seq"]).to_pydict().__repr__()


def in_store(runs: Path, base: str) -> str:
    for name in ("one", "sharded", "mistake"):
        upload(runs / name, f"{base}/{name}")
    return base


@pytest.mark.parametrize("candidate", ["sharded", "mistake"])
def test_shards_in_memory_are_joined_as_on_disk(runs: Path, candidate: str) -> None:
    base = in_store(runs, f"memory://{uuid4().hex}")
    local = tt.compare(runs / "one", runs / candidate)
    assert local.verdict == ("match" if candidate == "sharded" else "diverged"), local.sentence
    assert numbers(tt.compare(f"{base}/one", f"{base}/{candidate}")) == numbers(local)
    assert numbers(tt.compare(f"{base}/one", runs / candidate)) == numbers(local)


def test_workers_read_shards_from_s3_themselves(runs: Path, s3: S3Server) -> None:
    """Each worker opens the URL; every byte of the tensors is sent about once."""
    base = in_store(runs, f"s3://{BUCKET}/{uuid4().hex}")
    local = tt.compare(runs / "one", runs / "mistake", engine="serial")
    s3.forget()
    found = tt.compare(f"{base}/one", f"{base}/mistake", engine="serial")
    stored = sum(path.stat().st_size for name in ("one", "mistake") for path in (runs / name).rglob("*.*"))
    print(f"\nshards over S3: {len(s3.requests)} requests, {s3.sent:,} bytes of {stored:,} stored")
    assert numbers(found) == numbers(local)
    assert s3.sent <= 1.1 * stored
    assert len(s3.requests) <= 5 * 16, "the pieces of a rank are read together"
    assert numbers(tt.compare(f"{base}/one", f"{base}/mistake", engine="processes", workers=2)) == numbers(local)


def test_the_spool_of_a_ring_does_not_grow(tmp_path: Path) -> None:
    """Files of steps that left the ring leave the spool; a run that ends well has none of them in the store."""
    url, spool, held = f"memory://{uuid4().hex}/run", tmp_path / "spool", []
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.capture(model, url, optimizer=optimizer, ring=2, spool=spool) as tap:
        for step in range(30):
            model(torch.full((64, 64), float(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            held.append(len(list(spool.rglob("ring_*"))))
            if step == 20:
                tap.keep()
    steps = 2 + 1 + 2  # the ring, the step in progress, and two that a device may still report
    files = max(held[:20]) / steps
    assert 0 < files <= 4, "a file for each writer"
    assert max(held[:20]) == max(held[5:20]) and max(held) <= 2 * max(held[:20]) + 2 * files
    run = tt.open(url)
    kept = sorted({record.key.step for record in run if record.location is not None})
    assert 20 in kept and max(kept) <= 21 and len(kept) <= 4
    assert not list(spool.rglob("ring_*"))

"""Several ranks on one machine: each writes its own part of one run, and reports which gradients it saw."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import tensortap as tt

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))


def work(rank: int, modes: list[str], folder: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for mode in modes:
        record(rank, mode, f"{folder}/{mode}")
    dist.destroy_process_group()


def record(rank: int, mode: str, path: str) -> None:
    model = net()
    if mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    with tt.capture(model, path, keep="tensors", kinds=("output", "grad_output", "param", "param_grad")) as tap:
        model(batch(rank)).square().mean().backward()
        tap.step()


def has_fully_shard() -> bool:
    return importlib.util.find_spec("torch.distributed.fsdp") is not None and hasattr(
        importlib.import_module("torch.distributed.fsdp"), "fully_shard"
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both runs, of the same two processes: starting them takes longer than training."""
    folder = tmp_path_factory.mktemp("distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    modes = ["ddp", "fsdp2"] if has_fully_shard() else ["ddp"]
    mp.spawn(work, args=(modes, str(folder), port), nprocs=2)
    return folder


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_every_rank_writes_its_part(mode: str, runs: Path) -> None:
    if mode == "fsdp2" and not has_fully_shard():
        pytest.skip("this torch has no fully_shard")
    found = tt.open(runs / mode)
    assert found.ranks == [0, 1] and found.finished and found.info["world"] == 2
    keys = [{r.key for r in found.records(rank=rank)} for rank in (0, 1)]
    assert keys[0] == keys[1] and {key.module for key in keys[0]} == {"", "0", "1", "2"}
    said = " ".join([*found.notices, *(row.reason for row in found.coverage[0])])
    assert ("before DistributedDataParallel averages" if mode == "ddp" else "this rank's shard") in said

    gradients = []
    for rank in (0, 1):
        model = net()
        model(batch(rank)).square().mean().backward()
        gradients.append(model[0].weight.grad.numpy())
    recorded = [
        found.load(next(r for r in found.records(rank=rank, kind="param_grad", module="0") if r.key.path == "weight"))
        for rank in (0, 1)
    ]
    if mode == "ddp":
        assert all(np.allclose(ours, alone, atol=1e-7) for ours, alone in zip(recorded, gradients, strict=True))
    else:
        assert np.allclose(np.concatenate(recorded), (gradients[0] + gradients[1]) / 2, atol=1e-7)

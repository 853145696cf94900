"""Paddle's distributed tensors, wrappers and optimizers, as far as one process on a CPU can make them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from support.tapping import ALL_KINDS, values
from tensortap.core.placement import Mesh, Placement
from tensortap.errors import UsageError

paddle = pytest.importorskip("paddle")
nn = paddle.nn
dist = pytest.importorskip("paddle.distributed")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:paddle", "ignore::FutureWarning:paddle")


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        one, two = self.up(x).chunk(2, axis=-1)
        return self.down(paddle.concat([nn.functional.relu(one), two], axis=-1))


def batch(seed: int = 0) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal((4, 4)), dtype="float32")


# --- distributed tensors --------------------------------------------------------------------------------------------
def local(tensor: Any) -> Any:
    return np.asarray(tensor._local_value() if tensor.is_dist() else tensor)


def sharded(mesh: Any) -> Any:
    def shard(_name: str, layer: Any, mesh: Any) -> None:
        if isinstance(layer, nn.Linear):
            layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Shard(1)])
            layer.bias = dist.shard_tensor(layer.bias, mesh, [dist.Replicate()])

    paddle.seed(2)
    return dist.shard_layer(Net(), mesh, shard)


@pytest.mark.skipif(paddle.__version__.startswith("3.0"), reason="paddle 3.0 shards no tensors on a CPU")
@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_distributed_tensors_are_recorded_as_this_ranks_share(run_path: Path, keep: str) -> None:
    mesh = dist.ProcessMesh([0], dim_names=["x"])

    def trained(path: Path | None) -> list[Any]:
        model = sharded(mesh)
        optimizer = paddle.optimizer.AdamW(learning_rate=0.1, parameters=model.parameters())
        tap = None if path is None else tt.capture(model, path, keep=keep, kinds=ALL_KINDS)
        found = []
        for step in range(3):
            output = model(dist.shard_tensor(batch(step), mesh, [dist.Shard(0)]))
            loss = output.square().mean()
            loss.backward()
            found += [local(output), local(loss), *(local(parameter.grad) for parameter in model.parameters())]
            optimizer.step()
            optimizer.clear_grad()
            if tap is not None:
                tap.step()
        if tap is not None:
            tap.close()
        return found + [local(parameter) for parameter in model.parameters()]

    plain, tapped = trained(None), trained(run_path)
    assert all(np.array_equal(a, b) for a, b in zip(plain, tapped, strict=True))
    run = tt.open(run_path)
    assert ["the values that this rank holds" in notice for notice in run.notices] == [True]
    assert {row.status for row in run.coverage[0]} == {"seen"}
    if keep == "tensors":
        assert np.array_equal(values(run, "output")["", 0, "0"], plain[0])
        found = values(run, "param_grad")
        names = [("down", 0, "bias"), ("down", 0, "weight"), ("up", 0, "bias"), ("up", 0, "weight")]
        assert sorted(found) == names
        assert np.array_equal(found["up", 0, "weight"], plain[2])


# --- wrappers of models ---------------------------------------------------------------------------------------------
def stand_in(name: str, attribute: str) -> Any:
    """A wrapper of fleet's own class, without the communication that its constructor sets up."""
    module = pytest.importorskip("paddle.distributed.fleet.meta_parallel")
    sharding = pytest.importorskip("paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2")
    if name == "GroupShardedStage3":
        sharding = pytest.importorskip("paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3")
    base = getattr(module, name, None) or getattr(sharding, name)

    def build(self: Any, layers: Any) -> None:
        nn.Layer.__init__(self)
        setattr(self, attribute, layers)

    def forward(self: Any, x: Any) -> Any:
        return getattr(self, attribute)(x)

    return type(name, (base,), {"__init__": build, "forward": forward, "__getattr__": nn.Layer.__getattr__})


WRAPPERS = {
    "TensorParallel": "_layers",
    "ShardingParallel": "_layers",
    "SegmentParallel": "_layers",
    "PipelineParallel": "_layers",
    "PipelineParallelWithInterleave": "_layers",
    "GroupShardedStage2": "_layer",
    "GroupShardedStage3": "_layer",
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_fleets_wrappers_are_not_part_of_names(run_path: Path, name: str) -> None:
    model = stand_in(name, WRAPPERS[name])(Net())
    with tt.capture(model, run_path) as tap:
        model(batch()).sum().backward()
        tap.step()
    assert [(row.module, row.cls, row.status) for row in tap.coverage] == [
        ("", "Net", "seen"),
        ("up", "Linear", "seen"),
        ("down", "Linear", "seen"),
    ]


def test_a_users_class_with_the_name_of_a_wrapper_is_a_module(run_path: Path) -> None:
    class TensorParallel(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self._layers = Net()

        def forward(self, x: Any) -> Any:
            return self._layers(x)

    with tt.capture(TensorParallel(), run_path) as tap:
        pass
    assert [row.module for row in tap.coverage] == ["", "_layers", "_layers.up", "_layers.down"]


# --- wrappers of optimizers -----------------------------------------------------------------------------------------
def mixed_precision(model: Any, optimizer: Any) -> tuple[Any, Any]:
    utils = pytest.importorskip("paddle.distributed.fleet.utils.mix_precision_utils")
    return utils.MixPrecisionLayer(model, dtype="float16"), utils.MixPrecisionOptimizer(optimizer)


def look_ahead(model: Any, optimizer: Any) -> tuple[Any, Any]:
    return model, paddle.incubate.LookAhead(optimizer, alpha=0.5, k=2)


def auto_parallel(model: Any, optimizer: Any) -> tuple[Any, Any]:
    return model, dist.shard_optimizer(optimizer)


def holds_itself(model: Any, optimizer: Any) -> tuple[Any, Any]:
    optimizer._optim = optimizer  # as stage 3 of sharding leaves it
    return model, optimizer


class Own:
    """A user's wrapper: its minimize calls its step, and its step that of the optimizer inside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def minimize(self, _loss: Any) -> None:
        self.step()

    def clear_grad(self) -> None:
        self.optimizer.clear_grad()


@pytest.mark.parametrize("wrap", [mixed_precision, look_ahead, auto_parallel, holds_itself])
def test_steps_of_wrapped_optimizers_are_counted(run_path: Path, wrap: Any) -> None:
    def trained(path: Path | None) -> list[Any]:
        paddle.seed(4)
        net = Net()
        optimizer = paddle.optimizer.AdamW(learning_rate=0.1, parameters=net.parameters())
        model, outer = wrap(net, optimizer)
        own = {id(part): set(vars(part)) for part in (optimizer, outer)}
        tap = None if path is None else tt.capture(model, path, optimizer=outer)
        for step in range(3):
            model(batch(step)).square().mean().backward()
            outer.step()
            outer.clear_grad()
        if tap is not None:
            tap.close()
            assert all("step" not in set(vars(part)) - own[id(part)] for part in (optimizer, outer))
        return [parameter.numpy() for parameter in net.parameters()]

    plain, tapped = trained(None), trained(run_path)
    assert all(np.array_equal(a, b) for a, b in zip(plain, tapped, strict=True))
    run = tt.open(run_path)
    assert sorted({r.key.step for r in run}) == [0, 1, 2]
    assert run.notices == []


def test_a_wrapper_that_calls_itself_counts_once(run_path: Path) -> None:
    model = Net()
    optimizer = Own(paddle.optimizer.SGD(parameters=model.parameters()))
    with tt.capture(model, run_path, optimizer=optimizer):
        for step in range(3):
            loss = model(batch(step)).mean()
            loss.backward()
            optimizer.minimize(loss)
            optimizer.clear_grad()
    assert sorted({r.key.step for r in tt.open(run_path)}) == [0, 1, 2]


def test_an_object_without_an_optimizer_is_refused(run_path: Path) -> None:
    model = Net()
    with pytest.raises(UsageError, match=r"takes a paddle.optimizer.Optimizer, or a wrapper around one, not a Own"):
        tt.capture(model, run_path, optimizer=Own(model))


# --- two processes --------------------------------------------------------------------------------------------------
def ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found


@pytest.mark.parametrize(("kind", "wrapper"), [("dp", "DataParallel"), ("sharding", "ShardingParallel")])
def test_a_fleet_of_two(run_path: Path, kind: str, wrapper: str) -> None:
    script = Path(__file__).parents[1] / "support" / "fleet_rank.py"
    endpoints = [f"127.0.0.1:{port}" for port in ports(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), kind, str(run_path)],
            env=os.environ
            | {
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": "2",
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
                "PADDLE_DISTRI_BACKEND": "gloo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    for rank, (out, err) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, err
        assert "44 in parameters (176 B), all trained" in out  # whichever rank steps them
        assert out.splitlines()[-1] == f"same {wrapper} HybridParallelOptimizer"
    run = tt.open(run_path)
    assert run.ranks == [0, 1]
    assert {r.key.module for r in run} == {"", "0", "1", "2"}
    assert sorted({r.key.step for r in run}) == [0, 1, 2]
    assert run.mesh(1) == Mesh((kind,), (2,), (1,))
    output = next(r for r in run.records(rank=1, module="0", kind="output")).placement
    assert output == Placement((6, 6), (((0, 3, 3), (0, 0, 6)),), {kind: "shard"}, "guess")
    gradient = next(r for r in run.records(rank=1, module="0", kind="param_grad")).placement
    assert gradient is not None and gradient.axes == {kind: "partial:mean"} and gradient.is_whole


def test_the_placement_of_a_distributed_tensor() -> None:
    from tensortap.frameworks.paddle.placements import dist_placement

    mesh = dist.ProcessMesh([[1, 0], [2, 3]], dim_names=["dp", "mp"])
    placements = [dist.Partial(), dist.Shard(1)]
    found = dist_placement(SimpleNamespace(process_mesh=mesh, placements=placements, shape=[3, 5]))
    assert found == Placement((3, 5), (((0, 0, 3), (0, 3, 2)),), {"dp": "partial:sum", "mp": "shard"}, "paddle")

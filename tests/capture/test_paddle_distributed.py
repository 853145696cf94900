"""Paddle's distributed tensors, wrappers and optimizers, as far as one process on a CPU can make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from support.tapping import ALL_KINDS, values

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


# --- distributed tensors ---------------------------------------------------------------------------------------------
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

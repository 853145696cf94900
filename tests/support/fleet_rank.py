"""One rank of a paddle fleet on CPUs: trains without a tap and then under one, and prints whether both are the same.

python fleet_rank.py sharding|dp RUN        with the environment that paddle.distributed.launch sets
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.distributed import fleet

import tensortap as tt

STEPS = 3


def start(kind: str) -> None:
    strategy = fleet.DistributedStrategy()
    degrees = dict.fromkeys(("dp_degree", "mp_degree", "pp_degree", "sharding_degree"), 1)
    degrees[f"{kind}_degree"] = int(os.environ["PADDLE_TRAINERS_NUM"])
    strategy.hybrid_configs = degrees
    fleet.init(is_collective=True, strategy=strategy)


def trained(path: Path | None) -> tuple[list[Any], Any, Any]:
    paddle.seed(7)
    net = paddle.nn.Sequential(paddle.nn.Linear(4, 6), paddle.nn.ReLU(), paddle.nn.Linear(6, 2))
    optimizer = paddle.optimizer.AdamW(learning_rate=0.1, parameters=net.parameters())
    model, optimizer = fleet.distributed_model(net), fleet.distributed_optimizer(optimizer)
    tap = None if path is None else tt.capture(model, path, optimizer=optimizer)
    losses = []
    for step in range(STEPS):
        values = np.random.default_rng(10 * step + fleet.worker_index()).standard_normal((3, 4))
        loss = model(paddle.to_tensor(values, dtype="float32")).square().mean()
        loss.backward()
        losses.append(loss.numpy())
        optimizer.step()
        optimizer.clear_grad()
    if tap is not None:
        tap.close()
    return losses + [parameter.numpy() for parameter in net.parameters()], model, optimizer


def main() -> None:
    start(sys.argv[1])
    plain, _, _ = trained(None)
    tapped, model, optimizer = trained(Path(sys.argv[2]))
    same = all(np.array_equal(a, b) for a, b in zip(plain, tapped, strict=True))
    print(tt.inspect(model, optimizer=optimizer))
    print("same" if same else "other", type(model).__name__, type(optimizer).__name__)


main()

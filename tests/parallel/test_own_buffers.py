"""Parameters and buffers of wrapped models that are no replicas, although every process has them under one name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tensortap.frameworks.placing import MeshAxis
from tensortap.frameworks.torch.placements.sharded import flat_placement
from tensortap.frameworks.torch.placements.statistics import running_statistic

AXIS = MeshAxis("dp", 2, 1)


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_statistics_over_own_samples_are_no_replicas(name: str) -> None:
    found = running_statistic(nn.BatchNorm1d(4), name, (4,), ["dp"])
    assert found is not None and found.axes == {"dp": "partial:mean"} and found.guessed


@pytest.mark.parametrize(
    ("module", "name", "axes"),
    [
        (nn.BatchNorm2d(4), "num_batches_tracked", ["dp"]),
        (nn.SyncBatchNorm(4), "running_mean", ["dp"]),
        (nn.BatchNorm2d(4).eval(), "running_mean", ["dp"]),  # frozen: all processes keep the same
        (nn.BatchNorm2d(4), "running_mean", []),
        (nn.LayerNorm(4), "running_mean", ["dp"]),
    ],
)
def test_other_buffers_are_left_to_the_guess(module: nn.Module, name: str, axes: list[str]) -> None:
    assert running_statistic(module, name, (4,), axes) is None


def test_a_flat_parameter_is_a_range_or_gathered() -> None:
    flat = SimpleNamespace(_is_flat_param=True, _sharded_size=torch.Size([6]))
    own = flat_placement(flat, (6,), AXIS, "step_grad")
    assert own is not None and (own.shape, own.boxes, own.axes) == ((12,), (((0, 6, 6),),), {"dp": "shard"})
    for kind, role in (("param", "replica"), ("param_grad", "partial:mean")):
        gathered = flat_placement(flat, (11,), AXIS, kind)
        assert gathered is not None and gathered.is_whole and gathered.axes == {"dp": role}
    assert flat_placement(nn.Parameter(torch.ones(6)), (6,), AXIS, "param") is None

"""What a check says where it can do only a part of its work, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.errors import UsageError

KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batch() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def step(net: nn.Module) -> None:
    net(batch()).square().sum().backward()


def captured(path: Path, work: Callable[[nn.Module], None] = step, **options: Any) -> Path:
    with tt.capture(net := model(), path, **({"keep": "tensors", "kinds": KINDS} | options)):
        work(net)
    return path


def penalised(net: nn.Module) -> None:
    x = batch().requires_grad_()
    out = net(x).square().sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    (out + gradient.square().sum()).backward()


def test_a_gradient_penalty_is_left_as_it_is(run_path: Path) -> None:
    reference, net, free = captured(run_path, penalised), model(), model()
    with tt.check(net, reference) as check:
        penalised(net)
    penalised(free)
    assert check.result.verdict == "match", check.result.sentence
    for ours, theirs in zip(net.parameters(), free.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5), "the penalty must reach the parameters"
    assert any("create_graph=True" in note for note in check.result.notes)


def test_a_run_of_the_other_framework_is_refused(run_path: Path) -> None:
    import paddle

    with tt.capture(net := paddle.nn.Linear(8, 8), run_path, keep="tensors", kinds=KINDS):
        net(paddle.ones([4, 8])).sum().backward()
    with pytest.raises(UsageError, match=r"is a run of paddle, and the model is one of torch: .* tensortap\.compare"):
        tt.check(nn.Linear(8, 8), run_path)

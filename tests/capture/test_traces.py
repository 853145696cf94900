"""Forwards without values are neither recorded nor counted, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tensortap as tt
from support.tapping import everything

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 2))


def with_jit(model: nn.Module) -> None:
    traced = torch.jit.trace(model, torch.ones(2, 4))  # runs the model three times, and compares the graphs
    assert torch.equal(traced(torch.ones(2, 4)), model(torch.ones(2, 4)).detach())


def with_fake_tensors(model: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.ones(2, 4)).shape == (2, 2)


def with_export(model: nn.Module) -> None:
    torch.export.export(model, (torch.ones(2, 4),))


def train(model: nn.Module, trace: Callable[[nn.Module], None] | None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, on_error="raise", optimizer=optimizer) as tap:
        if trace is not None:
            model.eval()
            with torch.no_grad():
                trace(model)
            model.train()
        for _ in range(2):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tap


@pytest.mark.parametrize("trace", [with_jit, with_fake_tensors, with_export])
def test_a_trace_in_the_block_is_no_micro_step(trace: Callable[[nn.Module], None]) -> None:
    models = net(), net()
    plain, traced = train(models[0], None), train(models[1], trace)
    assert everything(plain.run) == everything(traced.run)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    if trace is not with_export:  # there, the compiler's own tracer runs no hook at all
        assert any("without values (torch.jit.trace, fake tensors)" in notice for notice in traced.notices)


def test_a_run_of_fake_tensors_alone_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeTensorMode():
        model = nn.Linear(4, 2)
        with tt.capture(model) as tap:
            model(torch.ones(2, 4)).sum().backward()
    assert not len(tap.run)
    assert "every forward ran without values" in capsys.readouterr().err

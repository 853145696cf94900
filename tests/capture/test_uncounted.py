"""A training loop with uncounted steps is reported; one step of many forwards is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt

OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(6, 4)).square().sum()


def uncounted_notices(path: Path) -> list[str]:
    return [notice for notice in tt.open(path).notices if "tap.step()" in notice]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("kinds", [("input", "output"), ("output", "grad_output"), ("param_grad",)])
def test_a_loop_that_counts_no_steps(run_path: Path, name: str, kinds: tuple[str, ...]) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model)
    with tt.capture(model, run_path, kinds=kinds) as tap:
        for _ in range(3):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    (notice_line,) = uncounted_notices(run_path)
    assert "3 forwards" in notice_line and "optimizer=" in notice_line
    assert any(notice_line.endswith(notice) for notice in tap.notices)


def test_gradients_that_add_up_are_one_step(run_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, run_path):
        for _ in range(4):
            loss(model).backward()
        optimizer.step()
    assert not uncounted_notices(run_path)


@pytest.mark.parametrize("counted", ["tap.step()", "optimizer="])
def test_a_loop_that_counts(run_path: Path, counted: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, run_path, optimizer=optimizer if counted == "optimizer=" else None) as tap:
        for _ in range(3):
            for _ in range(2):
                loss(model).backward()
            optimizer.step()
            if counted == "tap.step()":
                tap.step()
    assert not uncounted_notices(run_path)


def test_evaluation_and_a_load_are_no_training(run_path: Path) -> None:
    model = net()
    other = {key: value + 1 for key, value in net().state_dict().items()}
    with tt.capture(model, run_path):
        loss(model)
        model.load_state_dict(other)
        with torch.no_grad():
            for _ in range(3):
                loss(model)
        loss(model).backward()
    assert not uncounted_notices(run_path)


def test_a_repeated_forward_is_not_a_step(run_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, run_path):
        loss(model).backward()
        optimizer.step()
    assert not uncounted_notices(run_path)


def test_paddle(run_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    model = paddle.nn.Linear(4, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for steps, expected in ((1, 0), (2, 1)):
        with tt.capture(model, run_path, overwrite=True):
            for _ in range(steps):
                for _ in range(1 if steps == 2 else 3):
                    model(paddle.ones([3, 4])).sum().backward()
                optimizer.step()
                optimizer.clear_grad()
        assert len(uncounted_notices(run_path)) == expected


def test_a_step_of_several_forwards_with_other_parameters_is_counted(
    run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LBFGS calls the model inside its step; SAM moves the parameters, and back, before the step."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value

    with tt.capture(model, run_path, optimizer=optimizer) as tap:
        optimizer.step(closure)
    descent = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, optimizer=descent) as other:
        loss(model).backward()
        with torch.no_grad():
            model[0].weight.add_(1e-2)
        loss(model).backward()
        with torch.no_grad():
            model[0].weight.sub_(1e-2)
        descent.step()
    assert not capsys.readouterr().err
    assert [text for text in (*tap.notices, *other.notices) if "tap.step()" in text] == []


def test_an_optimizer_that_never_steps_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    watched, used = OPTIMIZERS["SGD"](model), OPTIMIZERS["AdamW"](model)
    with tt.capture(model, kinds=("param_grad",), optimizer=watched):
        for _ in range(16):
            loss(model).backward()
            used.step()
        assert "no step was counted" in capsys.readouterr().err

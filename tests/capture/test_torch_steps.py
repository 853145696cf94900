"""A step of a torch optimizer counts once, however many of its classes torch has wrapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt


class Twice(torch.optim.SGD):
    """Calls its parent's step, which torch has wrapped for the hooks, too."""

    failing = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.failing:
            raise RuntimeError("no step today")
        return result


@pytest.fixture
def trained() -> tuple[nn.Module, Twice]:
    model = nn.Linear(4, 4)
    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on SGD.step is wrapped
    return model, Twice(model.parameters(), lr=0.1)


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()


def test_a_capture_counts_it_once(trained: tuple[nn.Module, Twice], run_path: Path) -> None:
    model, optimizer = trained
    with tt.capture(model, run_path, optimizer=optimizer):
        for _ in range(3):
            backward(model)
            optimizer.step()
    assert {record.key.step for record in tt.open(run_path).records()} == {0, 1, 2}


def test_a_step_that_raised_is_none_and_the_next_one_counts(trained: tuple[nn.Module, Twice]) -> None:
    model, optimizer = trained
    with tt.audit(model, optimizer) as audit, tt.inspect(model, optimizer).watch() as live:
        backward(model)
        optimizer.failing = True
        with pytest.raises(RuntimeError, match="no step today"):
            optimizer.step()
        optimizer.failing = False
        for _ in range(2):
            backward(model)
            optimizer.step()
    assert audit.facts().steps == live.steps == 2


def test_a_closure_runs_inside_the_step(trained: tuple[nn.Module, Twice]) -> None:
    model, optimizer = trained

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    with tt.audit(model, optimizer) as audit, tt.inspect(model, optimizer).watch() as live:
        optimizer.step(closure)
    assert audit.facts().steps == live.steps == 1 and not live.warnings

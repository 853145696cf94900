"""`optimizer=` takes wrappers that keep the real optimizer as `.optimizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensortap as tt


class Accelerated(torch.optim.Optimizer):
    """As Accelerate's: torch's class without its state, and steps that are left out while gradients accumulate."""

    def __init__(self, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.optimizer, self._every, self._calls = optimizer, every, 0

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    def step(self, closure: Any = None) -> None:
        self._calls += 1
        if self._calls % self._every == 0:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._calls % self._every == 0:
            self.optimizer.zero_grad(set_to_none)


def test_a_wrapper_without_torchs_state(run_path: Path) -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Accelerated(Accelerated(inner, every=2), every=1)
    with tt.capture(model, run_path, optimizer=optimizer):
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {(r.key.step, r.key.micro) for r in tt.open(run_path)} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert not inner._optimizer_step_post_hooks


def test_inspection_watches_through_the_wrapper() -> None:
    model = nn.Linear(2, 2)
    optimizer = Accelerated(torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    with tt.inspect(model, optimizer).watch() as live:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert live.steps == 1


class Holder:
    """Steps the optimizer that it holds, without exposing it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def test_wrappers_that_show_no_parameters(run_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Holder(Holder(torch.optim.SGD(model.parameters(), lr=0.1)))
    with tt.capture(model, run_path, optimizer=optimizer):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert tt.open(run_path).steps == [0, 1, 2]


def test_an_optimizer_that_holds_itself(run_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.optimizer = optimizer
    with tt.capture(model, run_path, optimizer=optimizer):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert tt.open(run_path).steps == [0, 1]

"""A small model trained under a tap, with one change that a test chooses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tensortap as tt

KINDS = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "buffer")
Change = Callable[["Net", int], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1(self.norm(x)))
        return x + self.fc2(hidden * self.scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nothing(model: Net, step: int) -> None:
    pass


def train(
    path: Path,
    change: Change = nothing,
    *,
    steps: int = 3,
    keep: str = "tensors",
    kinds: tuple[str, ...] = KINDS,
    off: float = 0.0,
    rate: float = 0.1,
    loss_scale: float = 1.0,
) -> Path:
    """A run. `change` is called before each step; `off` is added to the data, all else is about the loop."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
        data = [(torch.randn(6, 4) + off, torch.randn(6, 3)) for _ in range(steps)]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with tt.capture(model, path, keep=keep, kinds=kinds) as tap:
        for step, (x, target) in enumerate(data):
            change(model, step)
            optimizer.zero_grad()
            (nn.functional.mse_loss(model(x), target) * loss_scale).backward()
            optimizer.step()
            tap.step()
    return path


def does(module: str, function: Callable[..., Any], since: int = 0) -> Change:
    """From a step on, the module's output is `function` of it."""

    def change(model: Net, step: int) -> None:
        target = model.get_submodule(module)
        if step == since:
            forward = target.forward
            target.forward = lambda *given: function(forward(*given))  # type: ignore[method-assign]

    return change

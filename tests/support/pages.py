"""Small runs to make report pages of: two ranks, names that want to be markup, mistakes in known places."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import tensortap as tt

HOSTILE = "</script><img src=x onerror=alert(1)><script>alert('owned')</script>"
"""A module's name may hold anything but a dot."""


class Scaled(nn.Linear):
    """A linear layer whose result is off by a factor."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = Scaled(16, 32)
        self.down = nn.Linear(32, 16)
        self.add_module(HOSTILE, nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.get_submodule(HOSTILE)(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Three blocks, and a parallel branch in which a second mistake can be born."""

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.side = Scaled(16, 16)
        self.head = nn.Linear(16, 4)
        self.extra = nn.Identity() if extra else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = self.side(x)
        for layer in self.layers:
            x = layer(x)
        if self.extra is not None:
            x = self.extra(x)
        return self.head(x + beside)


def trained(path: Path, factor: float, extra: bool = False, ranks: int = 2, keep: str = "tensors") -> None:
    """Three steps on each rank. With a factor, the second block's `up` and the branch are off."""
    for rank in range(ranks):
        with mock.patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(ranks)}):
            torch.manual_seed(1)
            model = Net(extra)
            model.side.factor = model.layers[1].up.factor = factor
            _train(model, path, rank, keep)


def broken(path: Path) -> None:
    """One rank; a layer that is dead from the start, and a NaN that is born in step 2."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)
            self.quiet = nn.ReLU()
            self.root = Root()
            self.head = nn.Linear(16, 4)
            self.count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            y = self.fc(x)
            silent = self.quiet(-y.abs() - 1)
            return self.head(self.root(y if self.count == 3 else y.abs() + 1) + silent)

    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sqrt()

    torch.manual_seed(1)
    _train(Broken(), path, 0, "tensors")


def _train(model: nn.Module, path: Path, seed: int, keep: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(seed)
    kinds = ("input", "output", "grad_output", "param_grad")
    with tt.capture(model, path, optimizer=optimizer, keep=keep, kinds=kinds):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=data)).square().mean().backward()
            optimizer.step()

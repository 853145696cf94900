"""A small model in both frameworks for tests of the saving hook, and short ways to train and evaluate it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortap.store.formats.npy.names import NpyName, files_in


@dataclass(frozen=True)
class SavingKit:
    """The parts of a framework that a test needs."""

    name: str
    net: Callable[..., Any]
    """A model of fc1, norm, fc2, of which fc1 and fc2 have a `dtype`. With `split` they sum in another order."""
    tensor: Callable[[Any], Any]
    no_grad: Callable[[], AbstractContextManager[Any]]
    float32: Callable[[Any], Any]
    checkpoint: Callable[..., Any]
    """Runs a function under reentrant activation checkpointing."""

    def batch(self, seed: int = 0, rows: int = 512) -> Any:
        return self.tensor(np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32))

    def train(self, model: Any, steps: int = 1, first: int = 0) -> None:
        model.train()
        for step in range(first, first + steps):
            self.float32(model(self.batch(step))).square().mean().backward()

    def evaluate(self, model: Any, steps: int = 1) -> None:
        """As trainers do it: evaluation mode and no gradients."""
        model.eval()
        with self.no_grad():
            for step in range(steps):
                model(self.batch(100 + step))


WIDTH = 64
CLASSES = ["Product", "LayerNorm"]


def kit_of(framework: str) -> SavingKit:
    return _torch() if framework == "torch" else _paddle()


def _torch() -> SavingKit:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Product(nn.Module):
        def __init__(self, seed: int, wide: int, split: bool, dtype: str) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.from_numpy(_weights(seed, wide)).to(getattr(torch, dtype)))
            self.split = split

        def forward(self, x: Any) -> Any:
            return _product(x.float(), self.weight.float(), self.split).to(self.weight.dtype)

    class Net(nn.Module):
        def __init__(self, split: bool = False, dtype: str = "float32") -> None:
            super().__init__()
            self.fc1, self.fc2 = Product(1, WIDTH, split, dtype), Product(2, 4, split, dtype)
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

        def forward(self, x: Any) -> Any:
            return self.fc2(self.norm(self.fc1(x).float()))

    return SavingKit(
        "torch",
        Net,
        torch.from_numpy,
        torch.no_grad,
        lambda x: x.float(),
        lambda function, x: checkpoint(function, x.requires_grad_(), use_reentrant=True),
    )


def _paddle() -> SavingKit:
    paddle = pytest.importorskip("paddle")
    nn = paddle.nn
    from paddle.distributed.fleet.utils import recompute

    class Product(nn.Layer):  # type: ignore[misc, name-defined]
        def __init__(self, seed: int, wide: int, split: bool, dtype: str) -> None:
            super().__init__()
            self.weight = self.create_parameter([WIDTH, wide], dtype=dtype)
            self.weight.set_value(paddle.to_tensor(_weights(seed, wide)).astype(dtype))
            self.split = split

        def forward(self, x: Any) -> Any:
            weight = self.weight.astype("float32")
            return _product(x.astype("float32"), weight, self.split).astype(self.weight.dtype)

    class Net(nn.Layer):  # type: ignore[misc, name-defined]
        def __init__(self, split: bool = False, dtype: str = "float32") -> None:
            super().__init__()
            self.fc1, self.fc2 = Product(1, WIDTH, split, dtype), Product(2, 4, split, dtype)
            self.norm = nn.LayerNorm(WIDTH, weight_attr=False, bias_attr=False)

        def forward(self, x: Any) -> Any:
            return self.fc2(self.norm(self.fc1(x).astype("float32")))

    def checkpointed(function: Any, x: Any) -> Any:
        x.stop_gradient = False
        return recompute(function, x)

    return SavingKit("paddle", Net, paddle.to_tensor, paddle.no_grad, lambda x: x.astype("float32"), checkpointed)


def _weights(seed: int, wide: int) -> Any:
    return np.random.default_rng(seed).standard_normal((WIDTH, wide)).astype(np.float32) / WIDTH**0.5


def _product(x: Any, weight: Any, split: bool) -> Any:
    if not split:
        return x @ weight
    parts = [x[:, at : at + 8] @ weight[at : at + 8] for at in range(0, WIDTH, 8)]
    return sum(parts[::-1][1:], parts[-1])


def saved(path: Path, kind: str = "tensors", rank: int = 0) -> list[NpyName]:
    """Return the parsed names of the saved files, in order."""
    folder = path / kind / f"rank_{rank}"
    return [name for _, name in files_in(folder) if name is not None] if folder.is_dir() else []


def micro_steps(path: Path, kind: str = "tensors") -> list[int]:
    return [name.micro for name in saved(path, kind)]

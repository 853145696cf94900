"""The mirrored model trained in either framework: one way to write a test that runs on both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import torch

from support import mirror, tapping

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Library:
    """torch or paddle."""

    name: str

    @property
    def module(self) -> Any:
        return torch if self.name == "torch" else paddle

    def model(self, seed: int = 0) -> Any:
        if self.name == "paddle":
            paddle.seed(seed)
            return mirror.paddle_model()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return mirror.torch_model()

    def tensor(self, array: Any) -> Any:
        return torch.from_numpy(array) if self.name == "torch" else paddle.to_tensor(array)

    def optimizer(self, model: Any) -> Any:
        if self.name == "torch":
            return torch.optim.AdamW(model.parameters(), lr=0.01)
        return paddle.optimizer.AdamW(learning_rate=0.01, parameters=model.parameters())

    def train(
        self,
        model: Any,
        step_over: Callable[[], None] = lambda: None,
        *,
        steps: int = 2,
        optimizer: Any = None,
        first: int = 0,
    ) -> list[float]:
        """Train for some steps, and call `step_over` after each; return the losses."""
        optimizer = optimizer or self.optimizer(model)
        losses = []
        for step in range(first, first + steps):
            loss = model(self.tensor(mirror.tokens(step))).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            (optimizer.zero_grad if self.name == "torch" else optimizer.clear_grad)()
            step_over()
        return losses

    def scale(self, parameter: Any, factor: float) -> None:
        """A planted mistake: multiply a parameter."""
        with self.module.no_grad():
            if self.name == "torch":
                parameter.mul_(factor)
            else:
                parameter.set_value(parameter * factor)

    def parameters(self, model: Any) -> list[Array]:
        return [parameter.detach().numpy().copy() for parameter in model.parameters()]

    def hooks_on(self, model: Any) -> int:
        if self.name == "torch":
            return tapping.hooks_on(model)
        layers = model.sublayers(include_self=True)
        return sum(len(layer._forward_pre_hooks) + len(layer._forward_post_hooks) for layer in layers)

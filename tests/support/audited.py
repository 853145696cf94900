"""A small network in either framework, and the few words in which loading and training it differ."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

__all__ = ["Library", "MasterSGD"]


class Library:
    """The few words in which the two frameworks differ."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "torch":
            import torch
            from torch import nn

            self.base, self.lib = nn.Module, torch
            self.norm, self.mean = nn.BatchNorm1d, "norm.running_mean"
        else:
            import paddle
            from paddle import nn

            self.base, self.lib = nn.Layer, paddle
            self.norm, self.mean = nn.BatchNorm1D, "norm._mean"
        self.nn = nn

    def net(self, seed: int, classes: int = 3) -> Any:
        library = self
        (self.lib.manual_seed if self.name == "torch" else self.lib.seed)(seed)

        class Net(self.base):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()
                self.embed = library.nn.Linear(4, 8)
                self.norm = library.norm(8)
                self.head = library.nn.Linear(8, classes)

            def forward(self, x: Any) -> Any:
                return self.head(self.norm(self.embed(x)))

        return Net()

    def tensor(self, *shape: int) -> Any:
        values = np.linspace(-1, 2, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        return self.lib.tensor(values) if self.name == "torch" else self.lib.to_tensor(values)

    def checkpoint(self, seed: int = 7, classes: int = 3) -> dict[str, Any]:
        return {key: value.clone() for key, value in self.net(seed, classes).state_dict().items()}

    def load(self, module: Any, state: Any) -> Any:
        return module.load_state_dict(state, strict=False) if self.name == "torch" else module.set_state_dict(state)

    def loader(self, module: Any) -> Any:
        """Call this on a separate line: events record the line."""
        return partial(module.load_state_dict, strict=False) if self.name == "torch" else module.set_state_dict

    def optimizer(self, model: Any, rate: float = 0.1) -> Any:
        if self.name == "torch":
            return self.lib.optim.SGD(model.parameters(), lr=rate)
        return self.lib.optimizer.SGD(rate, parameters=model.parameters())

    def adam(self, model: Any, rate: float) -> Any:
        if self.name == "torch":
            return self.lib.optim.Adam(model.parameters(), lr=rate)
        return self.lib.optimizer.Adam(rate, parameters=model.parameters())

    def read(self, tensor: Any) -> Any:
        """A NumPy copy."""
        return (tensor.detach() if self.name == "torch" else tensor).numpy().copy()

    def write(self, tensor: Any, values: Any) -> None:
        """In place, behind autograd's back."""
        if self.name == "torch":
            tensor.data.copy_(self.lib.as_tensor(values))
        else:
            tensor.set_value(self.lib.to_tensor(values))

    def train(self, model: Any, optimizer: Any, steps: int = 1) -> None:
        for _ in range(steps):
            (optimizer.zero_grad if self.name == "torch" else optimizer.clear_grad)()
            (model(self.tensor(6, 4)) * self.tensor(6, 3)).square().mean().backward()
            optimizer.step()

    def fill(self, tensor: Any, value: float) -> None:
        """Behind autograd's back, where no version counts it."""
        if self.name == "torch":
            tensor.data.fill_(value)
        else:
            tensor.set_value(self.lib.full(tensor.shape, value))

    def attributes(self, model: Any) -> list[set[str]]:
        parts = model.modules() if self.name == "torch" else model.sublayers(include_self=True)
        return [set(vars(part)) for part in parts]

    def hooks(self, model: Any) -> int:
        after = "_forward_hooks" if self.name == "torch" else "_forward_post_hooks"
        return len(model._forward_pre_hooks) + len(getattr(model, after))


class MasterSGD:
    """Descends on float32 copies of its own and writes them into the model, as mixed-precision optimizers do."""

    def __init__(self, library: Library, model: Any, rate: float = 0.1, share: float = 1.0) -> None:
        self.library, self.rate, self.share = library, rate, share
        self.params = [p for p in model.parameters() if not getattr(p, "stop_gradient", False)]
        self.masters = [library.read(p) for p in self.params]

    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            if param.grad is not None:
                master -= self.rate * self.library.read(param.grad)
            old = self.library.read(param)
            self.library.write(param, self.share * master + (1 - self.share) * old)

    def zero_grad(self) -> None:
        for param in self.params:
            if self.library.name == "torch":
                param.grad = None
            else:
                param.clear_gradient()

    clear_grad = zero_grad

"""One small model written twice: the same names and the same numbers in both frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np


def torch_model() -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

        def forward(self, x: Any, *, scale: Any) -> Any:
            return {"hidden": x + self.fc2(self.act(self.fc1(self.norm(x)))) * scale, "pair": (x * 2, x * 3)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.norm = nn.BatchNorm1d(8)
            self.shared = nn.Linear(8, 8)
            self.unused = nn.Linear(2, 2)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                out = block(x, scale=torch.full((1,), 0.5))
                x = out["hidden"] + out["pair"][1] * 0.1
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
            return self.shared(self.shared(x))

    return Model()


def paddle_model() -> Any:
    import paddle
    from paddle import nn

    class Block(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

        def forward(self, x: Any, *, scale: Any) -> Any:
            return {"hidden": x + self.fc2(self.act(self.fc1(self.norm(x)))) * scale, "pair": (x * 2, x * 3)}

    class Model(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.blocks = nn.LayerList([Block(), Block()])
            self.norm = nn.BatchNorm1D(8)
            self.shared = nn.Linear(8, 8)
            self.unused = nn.Linear(2, 2)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                out = block(x, scale=paddle.full((1,), 0.5))
                x = out["hidden"] + out["pair"][1] * 0.1
            x = self.norm(x.transpose([0, 2, 1])).transpose([0, 2, 1])
            return self.shared(self.shared(x))

    return Model()


def copy_weights(source: Any, target: Any) -> None:
    """torch → paddle; Linear weights are transposed there."""
    import paddle

    linear = {name for name, module in source.named_modules() if type(module).__name__ == "Linear"}
    values = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if name in values:
            array = values[name].detach().numpy()
            module, _, leaf = name.rpartition(".")
            parameter.set_value(paddle.to_tensor(array.T.copy() if module in linear and leaf == "weight" else array))


def tokens(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 11, (3, 5))

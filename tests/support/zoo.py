"""Awkward torch models: each has one property that breaks tools that hook modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Doubled(torch.autograd.Function):
    """Right forward, twice too much backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class InPlaceModule(nn.Module):
    """A ReLU that overwrites the Linear's output, which for a 3-d input is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


class InPlaceAfter(nn.Module):
    """Changes a module's output in place once it has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y += 1
        y.mul_(2)
        return self.second(y)


class BehindAutograd(nn.Module):
    """Changes a module's output where no version counter sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y.data.mul_(2)
        return self.second(y)


class Views(nn.Module):
    """A module that returns views of what it computed."""

    class Split(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.chunk(2, dim=-1)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.split, self.second = nn.Linear(4, 8), Views.Split(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.split(self.first(x))
        return self.second(a.transpose(0, 1).transpose(0, 1) * b)


@dataclass
class Nested:
    hidden: torch.Tensor
    extra: dict[str, object]
    absent: torch.Tensor | None = None


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Structured(nn.Module):
    """Returns tuples, dicts, dataclasses and named tuples, nested, and takes keyword arguments."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor, mode: str = "plain") -> Nested:
            y = self.fc(x) * scale
            return Nested(y, {"pair": Pair(y + 1, y - 1), "list": [y * 2], "text": mode, "a.b": y * 3})

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Structured.Inner(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        nested = self.inner(x, scale=torch.full((1,), 0.5), mode="plain")
        pair = nested.extra["pair"]
        return {"logits": self.out(pair.left + nested.extra["a.b"]), "pair": pair, "loss": pair.right.sum()}


class Shared(nn.Module):
    """One module called three times, and known under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.again = self.layer
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(self.layer(self.norm(x)))
        return self.again(x)


class PassThrough(nn.Module):
    """Identity and disabled dropout return their input unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.identity, self.drop = nn.Linear(4, 4), nn.Identity(), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.identity(y) + self.drop(y) + y


class Frozen(nn.Module):
    """A frozen first layer, an unused layer, an unused output, integer inputs, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.both = Both()
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        used, _ = self.both(self.frozen(self.embed(tokens).detach()), self.embed(tokens))
        return self.head(used)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x) + y, self.right(x)


class Statistics(nn.Module):
    """BatchNorm's buffers move while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


class Residual(nn.Module):
    """The input is used three times inside and once outside: the order of gradient sums shows in the last bits."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.sigmoid(self.gate(x)) * self.up(x)) + x.sin()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gated, self.last = nn.Linear(4, 4), Residual.Gated(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y + self.gated(y))


class Checkpointed(nn.Module):
    """The recipe's hard case under activation checkpointing: in-place, shared, keyword arguments, `+=`."""

    class Block(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.fc, self.act, self.shared = nn.Linear(4, 4), nn.ReLU(inplace=True), shared

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            y = self.act(self.fc(x)) * scale
            y += 1
            return self.shared(y) + x

    def __init__(self, mode: str | None) -> None:
        super().__init__()
        self.mode = mode
        shared = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Checkpointed.Block(shared) for _ in range(3)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.mode is None:
                x = block(x, scale=0.5)
            elif self.mode == "reentrant":
                x = checkpoint(lambda t, b=block: b(t, scale=0.5), x, use_reentrant=True)
            else:
                x = checkpoint(block, x, scale=0.5, use_reentrant=False)
        return self.head(x)


def batch(shape: tuple[int, ...] = (3, 5, 4), seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loss_of(output: object) -> torch.Tensor:
    """Some number that every output takes part in, except where a model leaves one unused."""
    if isinstance(output, dict):
        output = output["logits"] + output["loss"]
    assert isinstance(output, torch.Tensor)
    return (output.float() * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).square().mean()

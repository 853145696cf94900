"""A four-layer character decoder, trained for a few steps under a tap.

Tensortap needs only the `with` line in `train`.
"""
# mypy: allow-subclassing-any, allow-untyped-calls
# (torch's types change with its version, so they are not followed: nn.Module is Any here.)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap

__all__ = ["KINDS", "Decoder", "optimizer_of", "train"]

KINDS = ("input", "output", "grad_output", "param_grad", "param")
TEXT = (
    "a tap is a small thing in a long pipe. it does not hold the water back, and it does not warm it; "
    "it only lets you see a little of what flows by. when two pipes should carry the same water and do not, "
    "you open one tap after the other, from the spring to the sea, until the first that runs a different colour. "
    "there you dig. "
)
ALPHABET = sorted(set(TEXT))


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """Rotary position embedding: rotates pairs of features by angles that grow with the position."""

    def __init__(self) -> None:
        super().__init__()
        self.base = 10_000.0

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[-2:]
        angles = torch.arange(length)[:, None] * self.base ** (-torch.arange(0, width, 2) / width)
        cos, sin = angles.cos(), angles.sin()
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Core(nn.Module):
    """The core of attention: scores, mask, softmax, weighted sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = width**-0.5
        self.hidden = 1  # the first masked diagonal: no position attends to later ones

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * self.scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(self.hidden)
        return self.softmax(scores.masked_fill(future, float("-inf"))) @ v


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.rotary = Rotary()
        self.core = Core(width // heads)
        self.out = nn.Linear(width, width)

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each of shape (batch, head, position, feature)."""
        q, k, v = packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.unpack(self.qkv(x))
        mixed = self.core(self.rotary(q), self.rotary(k), v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = Norm(width)
        self.attention = Attention(width, heads)
        self.norm2 = Norm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder that predicts the next letter."""

    def __init__(self, letters: int, width: int = 64, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, letters, bias=False)
        nn.init.normal_(self.letters.weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.letters(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with two groups: weight decay for matrices, none for vectors."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3)


def train(
    out: str | Path,
    *,
    plant: Callable[[Any, Any], None] | None = None,
    steps: int = 32,
    seed: int = 0,
    keep: str = "summary",
    overwrite: bool = False,
    batch: int = 8,
    length: int = 32,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train a new model under a tap that writes the run `out`; return the loss of each step.

    The same seed gives the same run. `plant` gets the model and its optimizer before the first step, to plant one of
    `demo.mistakes`.

    >>> train("runs/a", steps=3, on_step=lambda step, loss: print(step, loss))      # doctest: +SKIP
    """
    text = torch.tensor([ALPHABET.index(letter) for letter in TEXT])
    data = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    with _reproducible(seed):
        model = Decoder(len(ALPHABET))
        optimizer = optimizer_of(model)
        if plant is not None:
            plant(model, optimizer)
        with tensortap.capture(model, out, keep=keep, kinds=KINDS, optimizer=optimizer, overwrite=overwrite):
            for step in range(steps):
                starts = torch.randint(len(text) - length, (batch,), generator=data)
                letters = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
                logits = model(letters[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), letters[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                on_step(step, losses[-1])
    return losses


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Seed random numbers and use one thread, which is fastest for a small model; restore both afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

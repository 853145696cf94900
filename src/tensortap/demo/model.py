"""A two-layer decoder that learns to spell, trained for a few steps with a tap on it.

All there is to tensortap is the `with` line in `train`; the rest would be there anyway.
"""
# mypy: allow-subclassing-any, allow-untyped-calls
# (torch's types change with its version, so they are not followed: nn.Module is Any here.)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap

__all__ = ["Decoder", "train"]

TEXT = (
    "a tap is a small thing in a long pipe. it does not hold the water back, and it does not warm it; "
    "it only lets you see a little of what flows by. when two pipes should carry the same water and do not, "
    "you open one tap after the other, from the spring to the sea, until the first that runs a different colour. "
    "there you dig. "
)
ALPHABET = sorted(set(TEXT))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Predicts each next letter from those before it."""

    def __init__(self, letters: int, length: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        x = self.letters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train(
    out: str | Path,
    *,
    steps: int = 12,
    seed: int = 0,
    keep: str = "summary",
    overwrite: bool = False,
    batch: int = 8,
    length: int = 32,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train a fresh model, tapped into the run `out`; the loss of each step. The same seed gives the same run.

    >>> train("runs/demo", steps=3, on_step=lambda step, loss: print(step, loss))      # doctest: +SKIP
    """
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # who calls this keeps their random numbers
        torch.manual_seed(seed)
        model = Decoder(len(ALPHABET), length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor([ALPHABET.index(letter) for letter in TEXT])
    losses: list[float] = []
    with tensortap.capture(model, out, keep=keep, optimizer=optimizer, overwrite=overwrite):
        for step in range(steps):
            starts = torch.randint(len(text) - length, (batch,), generator=random)
            letters = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
            logits = model(letters[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), letters[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            on_step(step, losses[-1])
    return losses

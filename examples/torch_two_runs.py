"""Train one PyTorch model twice, with a mistake in the second, and let tensortap name it.

python examples/torch_two_runs.py
"""

from __future__ import annotations

import torch
from torch import nn

import tensortap as tt


class Block(nn.Module):
    """A residual MLP block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), Block(32), Block(32), Block(32), nn.Linear(32, 1))


def train(model: nn.Module, path: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1)
    with tt.capture(model, path, optimizer=optimizer, overwrite=True):
        for _ in range(3):
            x = torch.randn(64, 8, generator=data)
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main() -> None:
    train(build(), "runs/torch-reference")
    candidate = build()
    candidate[2].norm.eps = 1e-3  # the mistake: LayerNorm's default is 1e-5
    train(candidate, "runs/torch-candidate")
    print(tt.compare("runs/torch-reference", "runs/torch-candidate"))


if __name__ == "__main__":
    main()

"""A model that changes while it trains: its head is replaced, a block is added, and a new optimizer takes over.

usage: growing.py RESULT [mistake]
"""

import sys
from pathlib import Path

import torch


class Growing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def main(result: str, mistake: str = "") -> None:
    torch.manual_seed(10)
    model = Growing()
    losses = train(model, 2)
    model.head = torch.nn.Sequential(torch.nn.ELU(alpha=0.9 if mistake else 1.0), torch.nn.Linear(4, 2))
    model.blocks.append(torch.nn.Linear(4, 4))
    losses += train(model, 3)
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    Path(result).write_bytes(repr(losses).encode() + parameters)


def train(model: torch.nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])

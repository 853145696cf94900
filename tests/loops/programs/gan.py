"""A GAN: two models, two optimizers, each stepped once in an iteration.

usage: gan.py RESULT [mistake]
"""

import sys
from pathlib import Path

import torch
from torch.nn import functional


def main(result: str, mistake: str = "") -> None:
    torch.manual_seed(6)
    generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    slope = 0.3 if mistake else 0.2
    critic = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.LeakyReLU(slope), torch.nn.Linear(8, 1))
    train_generator = torch.optim.Adam(generator.parameters(), lr=2e-3)
    train_critic = torch.optim.Adam(critic.parameters(), lr=2e-3)
    losses = []
    for _ in range(4):
        real, noise = torch.randn(4, 2), torch.randn(4, 3)
        fake = generator(noise)
        loss = functional.softplus(-critic(real)).mean() + functional.softplus(critic(fake.detach())).mean()
        train_critic.zero_grad()
        loss.backward()
        train_critic.step()
        train_generator.zero_grad()
        fooled = functional.softplus(-critic(fake)).mean()
        fooled.backward()
        train_generator.step()
        losses += [loss.item(), fooled.item()]
    both = [*generator.parameters(), *critic.parameters()]
    Path(result).write_bytes(repr(losses).encode() + b"".join(each.detach().numpy().tobytes() for each in both))


if __name__ == "__main__":
    main(*sys.argv[1:])

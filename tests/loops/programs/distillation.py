"""Teacher and student, a loss module, and an averaged copy of the student.

usage: distillation.py RESULT [mistake]
"""

import copy
import sys
from pathlib import Path

import torch


def network(width: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))


def main(result: str, mistake: str = "") -> None:
    torch.manual_seed(7)
    teacher, student = network(16).eval().requires_grad_(False), network(5)
    average = copy.deepcopy(student).requires_grad_(False)
    criterion = torch.nn.KLDivLoss(reduction="batchmean", log_target=True)
    optimizer = torch.optim.RMSprop(student.parameters(), lr=1e-2)
    temperature = 2.5 if mistake else 2.0
    losses = []
    for _ in range(4):
        inputs = torch.randn(6, 4)
        target = torch.log_softmax(teacher(inputs) / 2.0, dim=-1)
        loss = criterion(torch.log_softmax(student(inputs) / temperature, dim=-1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, current in zip(average.parameters(), student.parameters(), strict=True):
                mean.lerp_(current, 0.1)
            losses += [loss.item(), average(inputs).sum().item()]
    both = [*student.parameters(), *average.parameters()]
    Path(result).write_bytes(repr(losses).encode() + b"".join(each.detach().numpy().tobytes() for each in both))


if __name__ == "__main__":
    main(*sys.argv[1:])

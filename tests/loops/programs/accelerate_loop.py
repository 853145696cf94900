"""Accelerate: prepared objects, accumulation, clipping, a scheduler, and evaluation.

usage: accelerate_loop.py RESULT [mistake]
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main(result: str, mistake: str = "") -> None:
    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    gelu = torch.nn.GELU(approximate="tanh" if mistake else "none")
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), gelu, torch.nn.LayerNorm(12), torch.nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = DataLoader(TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,))), batch_size=3)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    losses = []
    for _ in range(2):
        model.train()
        for inputs, labels in data:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses += [model(inputs).sum().item() for inputs, _ in data]
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    Path(result).write_bytes(repr(losses).encode() + parameters)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""torchrun with DistributedDataParallel; each rank writes RESULT.RANK.

usage: torchrun --nproc-per-node 2 ddp.py RESULT [mistake]
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(result: str, mistake: str = "") -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    network = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Softplus(), torch.nn.Linear(7, 2))
    if mistake and rank == 1:
        network[1].beta = 1.5
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(100 + rank)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    Path(f"{result}.{rank}").write_bytes(repr(losses).encode() + parameters)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

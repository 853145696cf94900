"""The CUDA kernel with a placement, against the same kernel without one, on one GPU.

python benchmarks/gpu_placed.py            prints TB/s, and ratios of time: 1.00 is as fast as a whole tensor
"""

from __future__ import annotations

import argparse
import statistics

import torch

from tensortap.core.placement import Placement
from tensortap.frameworks.torch.cuda.reader import CudaReader

ROUNDS, TIMES = 9, 8


def placements(rows: int, columns: int) -> dict[str, Placement | None]:
    """The parts of a whole that a local tensor may be."""
    heads = columns // 128
    return {
        "no placement": None,
        "a replica": Placement.of_whole((rows, columns), {"dp": "replica"}, ""),
        "rows": Placement.of_block((4 * rows, columns), (rows, 0), (rows, columns)),
        "columns": Placement.of_block((rows, 4 * columns), (0, columns), (rows, columns)),
        "columns, from 1 on": Placement.of_block((rows, 4 * columns + 3), (0, columns + 1), (rows, columns)),
        "two boxes": Placement(
            (4 * rows, columns),
            tuple(((at * rows // 2, (1 + 2 * at) * rows, rows // 2), (0, 0, columns)) for at in range(2)),
        ),
        "narrow columns": Placement.of_block((rows * heads, 512), (0, 128), (rows * heads, 128)),
    }


def seconds(reader: CudaReader, tensor: torch.Tensor, placement: Placement | None) -> float:
    found = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        tickets = [reader.submit(tensor, placement=placement) for _ in range(TIMES)]
        end.record()
        reader.end_step()
        reader.collect(tickets)
        found.append(begin.elapsed_time(end) / 1e3 / TIMES)
    return statistics.median(found[1:])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=32_768)
    arguments.add_argument("--columns", type=int, default=8192)
    options = arguments.parse_args()
    reader = CudaReader()
    for dtype in (torch.bfloat16, torch.float32):
        tensor = torch.randn((options.rows, options.columns), device="cuda", dtype=dtype)
        plain = 0.0
        for name, placement in placements(options.rows, options.columns).items():
            local = tensor.view(-1, 128) if name == "narrow columns" else tensor
            taken = seconds(reader, local, placement)
            plain = plain or taken
            print(f"{dtype!s:<15} {name:<20} {tensor.nbytes / taken / 1e12:5.2f} TB/s  {taken / plain:5.2f}")


if __name__ == "__main__":
    main()

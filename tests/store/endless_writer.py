"""Writes a run until it is killed. After each flush it prints how many records are promised to be on disk.

Usage: endless_writer.py FOLDER SEED. Record n is of tensor n // 2, whose bytes follow from its number,
as do the plain arguments of its call.
"""

from __future__ import annotations

import os
import random
import sys
import time

import numpy as np
from storing import record, summary

from tensortap.store import RunWriter


def contents(tensor: int) -> np.ndarray:
    size = 60_000 if tensor % 23 == 0 else tensor * 37 % 900
    return (np.arange(size) + tensor).astype([np.float32, np.int64, np.uint8][tensor % 3])


def main(folder: str, seed: int) -> None:
    dice = random.Random(seed)
    buffer = dice.choice([1000, 50_000, 1 << 20])
    writer = RunWriter(folder, info={}, writers=1 + seed % 2, max_buffer=buffer, calls=True)
    seq = 0
    for step in range(10**9):
        for _ in range(dice.randrange(1, 12)):
            array = contents(seq // 2)
            writer.called(step, 0, f"layers.{seq // 2}", 0, {"tensor": seq // 2})
            where = writer.put(f"tensor {seq // 2}", array, step=step)
            for _twice in range(2):
                tensor = seq // 2
                writer.append(record(tensor, array, where, seq=seq, step=step, summary=summary(tensor)))
                seq += 1
        if dice.random() < 0.5:
            writer.end_step(step)
        if dice.random() < 0.5:
            writer.flush()
            os.write(1, f"{seq}\n".encode())
        if dice.random() < 0.1:
            time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

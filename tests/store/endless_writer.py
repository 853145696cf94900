"""Starts processes that write a run until they are killed.

After each flush, such a process appends to FOLDER.promised how many records are promised to be on disk. Record n is of
tensor n // 2, whose bytes follow from its number, as do the plain arguments of its call.

Requests are lines: `start FOLDER SEED` answers with the id of a new process, `wait ID` with its exit code. Processes
are forked from this one, which has imported what they need: that takes longer than what they do.
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


def write(folder: str, seed: int) -> None:
    promises = os.open(f"{folder}.promised", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
            os.write(promises, f"{seq}\n".encode())
        if dice.random() < 0.1:
            time.sleep(0.01)


def main() -> None:
    for line in sys.stdin:
        request, *given = line.split()
        if request == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(int(given[0]), 0)[1])
        elif (answer := os.fork()) == 0:
            try:
                write(given[0], int(given[1]))
            finally:
                os._exit(1)  # it never goes on with the requests
        print(answer, flush=True)


if __name__ == "__main__":
    main()

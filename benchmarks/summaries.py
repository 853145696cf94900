"""Time and memory of comparing two runs of summaries in which every record differs, by number of records.

    python benchmarks/summaries.py [--records 125000 250000 500000 1000000] [--ranks 1] [--case all] [--folder /tmp]

Each comparison runs in a process of its own, on one core. The table shows its processor time, its peak memory above
that of a process that has only imported tensortap, and how the time grows: the exponent of the number of records.
Cases: `rounding` (each record is off by less than its own rounding), `noise` (each is off by more, as far as the error
that came in allows), `mistake` (a wrong module in the first step, and everything after it is wrong).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tensortap.store import RunWriter

CASES = ("rounding", "noise", "mistake")
LEAVES = 5
A_BLOCK = 3 + 6 * LEAVES
"""Records of a block: its input, output and gradient, and those of its leaves with two parameters each."""


class Step:
    """The records of one step as columns: a stack of blocks of linear layers, forward and backward."""

    def __init__(self, step: int, blocks: int, seq: int, tensor: int, case: str, off: bool) -> None:
        self.rows: list[tuple[str, str, str, str, str, int]] = []
        self._step, self._first, self._tensor = step, seq, tensor
        forward = [(block, leaf) for block in range(blocks) for leaf in range(LEAVES)]
        value = self._new()
        for block, leaf in forward:
            name = f"layers.{block}.linear{leaf}"
            if not leaf:
                self._add(f"layers.{block}", "forward", "input", "Block", "0", value)
            self._add(name, "forward", "input", "Linear", "0", value)
            value = self._new()
            self._add(name, "forward", "output", "Linear", "0", value)
            if leaf == LEAVES - 1:
                self._add(f"layers.{block}", "forward", "output", "Block", "0", value)
        gradient = self._new()
        for block, leaf in reversed(forward):
            name = f"layers.{block}.linear{leaf}"
            if leaf == LEAVES - 1:
                self._add(f"layers.{block}", "backward", "grad_output", "Block", "0", gradient)
            self._add(name, "backward", "grad_output", "Linear", "0", gradient)
            for parameter in ("weight", "bias"):
                self._add(name, "backward", "param_grad", "Linear", parameter, self._new())
            gradient = self._new()
            self._add(name, "backward", "grad_input", "Linear", "0", gradient)
        self.tensors = self._tensor
        self._errors(case if off else "", blocks)

    def _new(self) -> int:
        self._tensor += 1
        return self._tensor - 1

    def _add(self, module: str, phase: str, kind: str, cls: str, path: str, tensor: int) -> None:
        self.rows.append((module, phase, kind, cls, path, tensor))

    def _errors(self, case: str, blocks: int) -> None:
        """Set the relative error of each row, the same for rows of one tensor."""
        tensor = np.array([row[5] for row in self.rows])
        spread = np.random.default_rng(1).uniform(0.5, 1.0, 64)[tensor % 64]
        size = {"": 0.0, "rounding": 5e-7, "noise": 2e-5, "mistake": 5e-7}[case]
        self.error = size * spread
        if case == "noise":  # grows from layer to layer, up to that size
            self.error = np.minimum(self.error, 1e-6 * 4.0 ** np.minimum(tensor - tensor[0], 10))
        if case == "mistake":
            at = next(
                n
                for n, row in enumerate(self.rows)
                if row[:3] == (f"layers.{blocks // 2}.linear2", "forward", "output")
            )
            self.error[tensor >= tensor[at] if not self._step else slice(None)] = 0.05

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def may_wait(self) -> bool:
        return False

    def arrive(self) -> None:
        return

    def columns(self) -> dict[str, Any]:
        module, phase, kind, cls, path, tensor = (list(column) for column in zip(*self.rows, strict=True))
        count = len(self.rows)
        tensors = np.array(tensor)
        dice = np.random.default_rng(0)
        values = dice.standard_normal((64, 256)).astype(np.float32) * np.float32(62.5)  # of norm 1000
        noise = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32) * np.float32(62.5)
        sketch = values[tensors % 64] * (1 + (tensors[:, None] % 1024).astype(np.float32) * np.float32(1e-6))
        sketch += self.error[:, None].astype(np.float32) * noise[tensors % 64]
        same = dict.fromkeys(("nan", "posinf", "neginf", "zeros", "edge", "micro", "call"), np.zeros(count, np.int64))
        vector = np.array([each == "bias" for each in path])
        return same | {
            "step": np.full(count, self._step),
            "phase": phase,
            "module": module,
            "kind": kind,
            "path": path,
            "seq": self._first + np.arange(count),
            "cls": cls,
            "dtype": ["float32"] * count,
            "shape": [[1024] if each else [1024, 1024] for each in vector],
            "tensor": tensors,
            "elements": np.where(vector, 1 << 10, 1 << 20),
            "min": np.full(count, -4.0),
            "max": np.full(count, 4.0),
            "mean": np.full(count, 1e-3),
            "std": np.full(count, 0.98),
            "l1": np.full(count, 8e5),
            "l2": np.full(count, 1000.0),
            "digest": (tensors.astype(np.uint64) << np.uint64(1)) + (self.error > 0),
            "sketch": sketch,
            "file": [None] * count,
            "offset": [None] * count,
            "nbytes": [None] * count,
        }


def write(path: Path, records: int, ranks: int, per_step: int, case: str, off: bool) -> int:
    """Write one side; return how many records it has."""
    blocks = max(1, min(per_step, records // ranks) // A_BLOCK)
    total = 0
    for rank in range(ranks):
        with RunWriter(path, rank=rank, world=ranks, info={"framework": "none", "config": {}}) as writer:
            seq = tensor = step = 0
            while seq + blocks * A_BLOCK <= max(records // ranks, blocks * A_BLOCK):
                rows = Step(step, blocks, seq, tensor, case, off)
                writer.append_rows(rows)
                writer.end_step(step)
                seq, tensor, step = seq + len(rows), rows.tensors, step + 1
            total += seq
    return total


def compare(reference: str, candidate: str) -> None:
    """Compare in this process; print seconds of processor time and the peak of memory, before and after."""
    import tensortap.compare.comparing  # what every comparison loads

    before, started = _peak(), time_of_processor()
    result = tensortap.compare(reference, candidate)
    print(
        json.dumps(
            {
                "seconds": time_of_processor() - started,
                "bytes": _peak() - before,
                "pairs": len(result),
                "verdict": result.verdict,
                "sentence": result.sentence,
                "counts": dict(result.counts),
            }
        )
    )


def time_of_processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak() -> int:
    """Return the peak of this process's resident memory. That of `getrusage` includes the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def measure(paths: list[Path]) -> dict[str, Any]:
    core = min(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(core), sys.executable, __file__, "--compare", *map(str, paths)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--records", type=int, nargs="+", default=[125_000, 250_000, 500_000, 1_000_000])
    arguments.add_argument("--ranks", type=int, default=1)
    arguments.add_argument("--per-step", type=int, default=10_000, help="records of a rank in a step")
    arguments.add_argument("--case", choices=(*CASES, "all"), default="all")
    arguments.add_argument("--folder", type=Path, default=None, help="folder for the runs, which are removed again")
    arguments.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.compare:
        compare(*options.compare)
        return
    for case in CASES if options.case == "all" else (options.case,):
        print(f"{case}: {options.ranks} rank{'s' * (options.ranks > 1)}, {options.per_step:,} records in a step")
        known: list[tuple[int, float]] = []
        for records in options.records:
            folder = Path(tempfile.mkdtemp(prefix="tensortap-bench-", dir=options.folder))
            try:
                paths = [folder / "reference", folder / "candidate"]
                counts = [
                    write(path, records, options.ranks, options.per_step, case, off)
                    for path, off in zip(paths, (False, True), strict=True)
                ]
                found = measure(paths)
            finally:
                shutil.rmtree(folder)
            assert found["pairs"] == counts[0], found
            known.append((counts[0], found["seconds"]))
            grown = ""
            if len(known) > 1:
                (n, a), (m, b) = known[-2:]
                grown = f"  exponent {math.log(b / a) / math.log(m / n):.2f}"
            print(
                f"  {counts[0]:>9,} records  {found['seconds']:6.1f} s  {found['bytes'] / 1e6:7.0f} MB  "
                f"{found['bytes'] / counts[0]:6.0f} bytes a record  {found['verdict']}{grown}"
            )


if __name__ == "__main__":
    main()

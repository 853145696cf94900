"""A small run on disk, and the command line that shows it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortap.cli import main
from tensortap.core.records import Coverage, Key, Record, Summary
from tensortap.store import RunWriter

MODULES = ("", "layers.0.fc1", "layers.0.fc2", "layers.1.fc1")


def record(seq: int, module: str, step: int, kind: str, rank: int = 0, **numbers: Any) -> Record:
    values: dict[str, Any] = {"elements": 12, "nan": 0, "posinf": 0, "neginf": 0, "zeros": seq % 3, "digest": seq}
    values |= {"edge": 0, "min": -float(seq), "max": seq / 2, "mean": seq / 4, "std": (seq * 7 % 5) / 8, "l1": 3.0}
    values |= {"l2": float(seq * 5 % 7), "sketch": np.full(4, seq, np.float32)}
    summary = Summary(**{**values, **numbers})
    phase = "backward" if kind.startswith("grad") else "forward"
    return Record(Key(step, 0, phase, module, 0, kind, "0"), rank, seq, "Linear", "float32", (3, 4), seq, summary)


def write(path: Path, steps: int = 2, rank: int = 0, world: int = 1, extra: tuple[Record, ...] = ()) -> None:
    """Per step: an output and a grad_output of each module. Step 1 has a NaN in the output of layers.0.fc2."""
    with RunWriter(path, rank=rank, world=world, info={"framework": "torch", "model": "Net", "modules": 4}) as writer:
        seq = 0
        for step in range(steps):
            for kind in ("output", "grad_output"):
                for module in MODULES:
                    bad = step == 1 and module == "layers.0.fc2" and kind == "output"
                    writer.append(record(seq, module, step, kind, rank, nan=2 * bad))
                    seq += 1
        for each in extra:
            writer.append(each)
        rows = [Coverage(module, "Linear", "seen", steps) for module in MODULES]
        writer.coverage([*rows, Coverage("layers.1.drop", "Dropout", "never called", 0, "unused")])


class CommandResult:
    """The result of one call of the command line."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def rows(self) -> list[list[str]]:
        """The cells of the table of records."""
        lines = re.sub("\x1b\\[[0-9;]*m", "", self.out).splitlines()
        start = next(at for at, line in enumerate(lines) if "module" in line.split() and "dtype" in line.split())
        return [line.split() for line in lines[start + 1 :] if "f32" in line.split()]


def call(capsys: pytest.CaptureFixture[str], *args: object) -> CommandResult:
    before = sys.argv
    sys.argv = ["tensortap", *map(str, args)]
    try:
        with pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return CommandResult(int(end.value.code or 0), out, err)

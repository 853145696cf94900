"""Two runs of summaries, made up as columns, that differ in one of several ways.

Cases:
- `rounding`: each record is off by less than its own rounding.
- `noise`: each is off by more, as far as the error that came in allows.
- `mistake`: a wrong module in the first step, and everything after it is wrong.
- `late`: noise, and a mistake in the middle of the run.
- `scattered`: noise, and one module in a hundred is wrong, in every step.
- `nonfinite`: noise, and NaN in everything after the middle of the run.
- `missing`: noise, and one record in fifty that the candidate lacks.
- `gradients`: noise in a run that has gradients alone.
- `outputs`: noise in a run that has outputs and gradients of parameters alone.
- `leaves`: noise in a run that has leaf modules alone.
- `state`: noise in a run that also has parameters, before and after each step, and the optimizer's gradients.
- `mixed`: a candidate in bfloat16, off by the rounding of that.
- `reshaped`: tensors of other shapes.
- `changing`: noise in steps of which no two have the same modules.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensortap.store import RunWriter

CASES = (
    "rounding",
    "noise",
    "mistake",
    "late",
    "scattered",
    "nonfinite",
    "missing",
    "gradients",
    "outputs",
    "leaves",
    "state",
    "mixed",
    "reshaped",
    "changing",
)
LEAVES = 5
PARAMETERS = ("weight", "bias")


_KEPT: dict[str, Callable[[Row], bool]] = {
    "gradients": lambda row: row.phase == "backward",
    "outputs": lambda row: row.kind in ("output", "param_grad"),
    "leaves": lambda row: row.cls == "Linear",
}
"""The rows that a case has, if not all."""


class Row(NamedTuple):
    module: str
    phase: str
    kind: str
    cls: str
    path: str
    tensor: int
    call: int = 0


class Step:
    """The records of one step as columns: a stack of blocks of linear layers, forward and backward.

    half: whether the step is in the second half of the run.

    `tensors` and `end` are the numbers of the next step's first tensor and record, which do not depend on the side.
    """

    def __init__(self, step: int, blocks: int, seq: int, tensor: int, case: str, off: bool, half: bool) -> None:
        self.rows: list[Row] = []
        self._step, self._first, self._tensor = step, seq, tensor
        self._case, self._off, self._half = case, off, half
        if case == "changing":
            blocks = max(1, blocks - step % 7 - step // 7 % 11)
        forward = [(block, leaf) for block in range(blocks) for leaf in range(LEAVES)]
        if case == "state" and not step:
            self._add_state(forward, "param", 0)
        self._add_forward(forward)
        self._add_backward(forward)
        if kept := _KEPT.get(case):
            self.rows = [row for row in self.rows if kept(row)]
        if case == "state":
            self._add_state(forward, "step_grad", 0)
            self._add_state(forward, "param", 1)
        self.tensors = self._tensor
        self.end = seq + len(self.rows)
        self._set_errors(blocks)
        if case == "missing" and off:
            self._drop()

    def _add_forward(self, leaves: list[tuple[int, int]]) -> None:
        value = self._new()
        self.rows.append(Row("", "forward", "input", "Model", "0", value))
        for block, leaf in leaves:
            name = f"layers.{block}.linear{leaf}"
            if not leaf:
                self.rows.append(Row(f"layers.{block}", "forward", "input", "Block", "0", value))
            self.rows.append(Row(name, "forward", "input", "Linear", "0", value))
            value = self._new()
            self.rows.append(Row(name, "forward", "output", "Linear", "0", value))
            if leaf == LEAVES - 1:
                self.rows.append(Row(f"layers.{block}", "forward", "output", "Block", "0", value))
        self.rows.append(Row("", "forward", "output", "Model", "0", value))

    def _add_backward(self, leaves: list[tuple[int, int]]) -> None:
        gradient = self._new()
        self.rows.append(Row("", "backward", "grad_output", "Model", "0", gradient))
        for block, leaf in reversed(leaves):
            name = f"layers.{block}.linear{leaf}"
            if leaf == LEAVES - 1:
                self.rows.append(Row(f"layers.{block}", "backward", "grad_output", "Block", "0", gradient))
            self.rows.append(Row(name, "backward", "grad_output", "Linear", "0", gradient))
            for parameter in PARAMETERS:
                self.rows.append(Row(name, "backward", "param_grad", "Linear", parameter, self._new()))
            gradient = self._new()
            self.rows.append(Row(name, "backward", "grad_input", "Linear", "0", gradient))

    def _add_state(self, leaves: list[tuple[int, int]], kind: str, call: int) -> None:
        for block, leaf in leaves:
            for parameter in PARAMETERS:
                name = f"layers.{block}.linear{leaf}"
                self.rows.append(Row(name, "state", kind, "Linear", parameter, self._new(), call))

    def _new(self) -> int:
        self._tensor += 1
        return self._tensor - 1

    def _set_errors(self, blocks: int) -> None:
        """Set the relative error of each row, the same for rows of one tensor."""
        tensor = np.array([row.tensor for row in self.rows])
        spread = np.random.default_rng(1).uniform(0.5, 1.0, 64)[tensor % 64]
        case = self._case if self._off else ""
        size = {"": 0.0, "rounding": 5e-7, "mistake": 5e-7, "mixed": 3e-2}.get(case, 2e-5)
        self.error = size * spread
        if size >= 2e-5:  # grows from layer to layer, up to that size
            first = next(row.tensor for row in self.rows if row.phase != "state")
            self.error = np.minimum(self.error, size / 20 * 2.0 ** np.clip(tensor - first, 0, 10))
        if case == "state":  # the optimizer starts from the same parameters
            self.error[[row.kind == "param" and not row.call for row in self.rows]] = 0.0
        if case == "mistake" or (case == "late" and self._half):
            at = next(n for n, row in enumerate(self.rows) if row[:3] == self._wrong(blocks))
            everything = self._step if case == "mistake" else False
            self.error[slice(None) if everything else tensor >= tensor[at]] = 0.05
        if case == "scattered":
            self.error[tensor % 100 == 50] = 0.05
        self._nan = np.zeros(len(tensor), np.int64)
        if case == "nonfinite" and self._half:
            self._nan[:] = 7

    @staticmethod
    def _wrong(blocks: int) -> tuple[str, str, str]:
        return f"layers.{blocks // 2}.linear2", "forward", "output"

    def _drop(self) -> None:
        """Remove one record in fifty."""
        kept = np.flatnonzero(np.random.default_rng(self._step).random(len(self.rows)) >= 0.02)
        self.rows = [self.rows[row] for row in kept.tolist()]
        self.error, self._nan = self.error[kept], self._nan[kept]

    def __len__(self) -> int:
        return len(self.rows)

    gathers = False

    @property
    def may_wait(self) -> bool:
        return False

    def arrive(self) -> None:
        return

    def columns(self) -> dict[str, Any]:
        module, phase, kind, cls, path, tensor, call = (list(column) for column in zip(*self.rows, strict=True))
        count = len(self.rows)
        tensors = np.array(tensor)
        dice = np.random.default_rng(0)
        values = dice.standard_normal((64, 256)).astype(np.float32) * np.float32(62.5)  # of norm 1000
        noise = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32) * np.float32(62.5)
        sketch = values[tensors % 64] * (1 + (tensors[:, None] % 1024).astype(np.float32) * np.float32(1e-6))
        sketch += self.error[:, None].astype(np.float32) * noise[tensors % 64]
        same = dict.fromkeys(("posinf", "neginf", "zeros", "edge", "micro"), np.zeros(count, np.int64))
        vector = np.array([each == "bias" for each in path])
        width = 2048 if self._off and self._case == "reshaped" else 1024
        dtype = "bfloat16" if self._off and self._case == "mixed" else "float32"
        return same | {
            "step": np.full(count, self._step),
            "phase": phase,
            "module": module,
            "kind": kind,
            "path": path,
            "call": np.array(call),
            "nan": self._nan,
            "seq": self._first + np.arange(count),
            "cls": cls,
            "dtype": [dtype] * count,
            "shape": [[width] if each else [1024, width] for each in vector],
            "tensor": tensors,
            "elements": np.where(vector, width, 1024 * width),
            "min": np.full(count, -4.0),
            "max": np.full(count, 4.0),
            "mean": np.full(count, 1e-3),
            "std": np.full(count, 0.98),
            "l1": np.full(count, 8e5),
            "l2": np.full(count, 1000.0),
            "digest": (tensors.astype(np.uint64) << np.uint64(1)) + ((self.error > 0) | (self._nan > 0)),
            "sketch": sketch,
            "file": [None] * count,
            "offset": [None] * count,
            "nbytes": [None] * count,
        }


def write_run(path: Path, records: int, ranks: int, per_step: int, case: str, off: bool) -> int:
    """Write one side; return how many records it has."""
    of_rank = records // ranks
    blocks = max(
        1, min(per_step, of_rank) // len(Step(1, 1, 0, 0, "noise" if case == "changing" else case, False, False))
    )
    length = len(Step(1, blocks, 0, 0, case, False, False))
    total = 0
    for rank in range(ranks):
        with RunWriter(path, rank=rank, world=ranks, info={"framework": "none", "config": {}}) as writer:
            seq = tensor = step = 0
            while not seq or seq + length <= of_rank:
                rows = Step(step, blocks, seq, tensor, case, off, 2 * seq > of_rank)
                writer.append_rows(rows)
                writer.end_step(step)
                seq, tensor, step = rows.end, rows.tensors, step + 1  # the same on both sides
                total += len(rows)
    return total

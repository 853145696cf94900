"""Hand-made runs: each tensor is given with its position; everything else follows from that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import Comparison, Key, Record
from tensortap.kernels import summarize
from tensortap.store import RunWriter

Array = npt.NDArray[Any]

PHASE = {"input": "forward", "output": "forward", "param": "state", "buffer": "state"}


@dataclass(frozen=True)
class Seen:
    """A tensor, and where it was seen. The same `tensor` number twice is the very same tensor."""

    module: str
    array: Array
    kind: str = "output"
    step: int = 0
    path: str = "0"
    micro: int = 0
    call: int = 0
    cls: str = "Linear"
    tensor: int | None = None
    keep: bool = True

    @property
    def key(self) -> Key:
        phase = PHASE.get(self.kind, "backward")
        return Key(self.step, self.micro, phase, self.module, self.call, self.kind, self.path)


def write(path: Path, seen: Iterable[Seen], rank: int = 0, world: int = 1, **info: Any) -> Path:
    """One rank of a finished run."""
    with RunWriter(path, rank=rank, world=world, info=info) as writer:
        for seq, each in enumerate(seen):
            where = writer.put(str(each.key), each.array, step=each.step) if each.keep else None
            writer.append(
                Record(
                    key=each.key,
                    rank=rank,
                    seq=seq,
                    cls=each.cls,
                    dtype=dtypes.name_of(each.array.dtype),
                    shape=each.array.shape,
                    tensor=seq if each.tensor is None else each.tensor,
                    summary=summarize(each.array),
                    location=where,
                )
            )
    return path


def values(number: int, shape: Sequence[int] = (4, 6), dtype: Any = np.float32) -> Array:
    """Always the same for a number."""
    found: Array = np.random.default_rng(number).normal(0, 1, tuple(shape)).astype(dtype)
    return found


def chain(
    names: Iterable[str] = ("fc1", "fc2", "fc3"), steps: Sequence[int] = (0,), off: Mapping[str, float] | None = None
) -> list[Seen]:
    """Modules one after the other, each with a tensor of its own going in and coming out. `off` adds to outputs."""
    found = []
    for step in steps:
        for number, name in enumerate(names):
            out = values(100 * step + number + 1) + np.float32((off or {}).get(name, 0.0))
            found += [Seen(name, values(100 * step + number), "input", step), Seen(name, out, "output", step)]
    return found


def rows(result: Comparison) -> dict[tuple[str, str, int], dict[str, Any]]:
    """(module, kind, step) → row of the table; for runs where that says it all."""
    return {(row["module"], row["kind"], row["step"]): row for row in result.rows}


def sides(result: Comparison) -> dict[str, list[str]]:
    """The modules of what only one side has, by side."""
    found: dict[str, list[str]] = {"reference": [], "candidate": []}
    for each in result.unmatched:
        found[each.side].append(each.key.module)
    return found

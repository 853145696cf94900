"""The plain data that all rooms speak. No behaviour beyond naming and arithmetic on its own fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

__all__ = [
    "KINDS",
    "PHASES",
    "Coverage",
    "Key",
    "Kind",
    "Location",
    "Phase",
    "Record",
    "Status",
    "Summary",
    "shown",
]

Phase = Literal["forward", "backward", "state"]
Kind = Literal["input", "output", "grad_input", "grad_output", "param", "param_grad", "buffer"]
Status = Literal["seen", "never called", "no gradient", "alias", "skipped"]

PHASES: tuple[str, ...] = get_args(Phase)
KINDS: tuple[str, ...] = get_args(Kind)


class Key(NamedTuple):
    """What a record is, the same on every rank and in every framework.

    >>> str(Key(3, 0, "forward", "layers.0.fc1", 0, "output", "0"))
    'layers.0.fc1 · output 0 · forward · step 3'
    """

    step: int
    """Counts `tap.step()`."""
    micro: int
    """Counts the root module's forwards within a step."""
    phase: str
    """forward | backward | state"""
    module: str
    """The structural name, wrappers stripped; the root is the empty string."""
    call: int
    """Counts calls of that module within the micro step. For param and buffer: 0 before the step, 1 after it."""
    kind: str
    """input | output | grad_input | grad_output | param | param_grad | buffer"""
    path: str
    """Where in the nested arguments or outputs the tensor sits, or the parameter's own name."""

    def __str__(self) -> str:
        parts = [shown(self.module), f"{self.kind} {self.path}", self.phase, f"step {self.step}"]
        if self.micro:
            parts.append(f"micro {self.micro}")
        if self.call:
            parts.append(f"call {self.call}")
        return " · ".join(parts)


def shown(module: str) -> str:
    """A module's name as people see it: the root has none and is shown as "(root)"."""
    return module or "(root)"


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """What is known of a tensor whose bytes were not kept. `kernels.reference` defines every field.

    The moments are over the finite elements; where there is none, min, max, mean and std are NaN. A complex tensor
    counts as its real and imaginary parts side by side.
    """

    elements: int
    nan: int
    posinf: int
    neginf: int
    zeros: int
    min: float
    max: float
    mean: float
    std: float
    l1: float
    l2: float
    digest: int
    sketch: npt.NDArray[np.float32]

    @property
    def nonfinite(self) -> int:
        return self.nan + self.posinf + self.neginf

    @property
    def finite(self) -> int:
        return self.elements - self.nonfinite


class Location(NamedTuple):
    """Where a tensor's bytes are: a file beside the index, and the span in it."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One tensor seen once: its identity, when and where it was seen, and what is known of it."""

    key: Key
    rank: int
    seq: int
    """Execution order within the rank."""
    cls: str
    """Class name of the module."""
    dtype: str
    shape: tuple[int, ...]
    tensor: int
    """Number of the tensor within the rank. Records with the same number saw the very same tensor."""
    summary: Summary
    location: Location | None = None
    """None if the bytes were not kept."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the tap saw of one module, and why not more."""

    module: str
    cls: str
    status: Status
    calls: int = 0
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "class": self.cls,
            "status": self.status,
            "calls": self.calls,
            "reason": self.reason,
        }

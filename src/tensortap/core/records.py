"""The plain data that all rooms speak. No behaviour beyond naming and arithmetic on its own fields."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from tensortap.core.presentation import reports

if TYPE_CHECKING:
    from tensortap.core.arguments import ArgumentDifference
    from tensortap.core.details import Detail
    from tensortap.core.name_mapping import NameMapping

__all__ = [
    "ALL_FROZEN",
    "EXIT_CODES",
    "GRADIENT_KINDS",
    "HEALTH_STATUSES",
    "KINDS",
    "PHASES",
    "STATE_KINDS",
    "STATUSES",
    "WRONG_STATUSES",
    "Comparison",
    "Coverage",
    "Difference",
    "Finding",
    "HealthFinding",
    "HealthReport",
    "Key",
    "Kind",
    "Location",
    "PairStatus",
    "Phase",
    "Record",
    "Statistics",
    "Status",
    "Summary",
    "Unmatched",
    "Verdict",
    "display_name",
]

Phase = Literal["forward", "backward", "state"]
Kind = Literal["input", "output", "grad_input", "grad_output", "param", "param_grad", "buffer"]
Status = Literal["seen", "never called", "no gradient", "alias", "skipped"]

PairStatus = Literal["equal", "close", "diverged", "nonfinite", "shape", "unjudged"]
Verdict = Literal["match", "diverged", "incomparable"]

EXIT_CODES: dict[str, int] = {"match": 0, "diverged": 1, "incomparable": 3}
"""How a command ends, by the verdict. 2 is for what cannot be read or written."""

STATUSES: tuple[str, ...] = get_args(PairStatus)
PHASES: tuple[str, ...] = get_args(Phase)
KINDS: tuple[str, ...] = get_args(Kind)
ALL_FROZEN = "all its parameters are frozen"
"""Why a module gets no gradient, in its coverage."""
WRONG_STATUSES: tuple[str, ...] = ("diverged", "nonfinite", "shape")
"""What a pair that is wrong may be."""
GRADIENT_KINDS = ("grad_output", "grad_input", "param_grad")
STATE_KINDS = ("param", "buffer", "param_grad")
"""What a module has, and not what one of its calls takes, gives or gets back."""
HEALTH_STATUSES: tuple[str, ...] = ("ok", "nonfinite", "exploding", "dead", "vanishing")
"""What a record of one run may be by itself; `compare.health` defines them."""


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
        parts = [display_name(self.module), f"{self.kind} {self.path}", self.phase, f"step {self.step}"]
        if self.micro:
            parts.append(f"micro {self.micro}")
        if self.call:
            parts.append(f"call {self.call}")
        return " · ".join(parts)


def display_name(module: str) -> str:
    """A module's name as people see it: the root has none and is shown as "(root)"."""
    return module or "(root)"


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Counts and moments of a tensor. The moments are over the finite elements; where there is none, min, max, mean and
    std are NaN. A complex tensor counts as its real and imaginary parts side by side."""

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

    @property
    def nonfinite(self) -> int:
        return self.nan + self.posinf + self.neginf

    @property
    def finite(self) -> int:
        return self.elements - self.nonfinite


@dataclass(frozen=True, slots=True, eq=False)
class Summary(Statistics):
    """What is known of a tensor whose bytes were not kept. `kernels.reference` defines every field."""

    sketch: npt.NDArray[np.float32]


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
    base: str = ""
    """The framework's own class that the module's inherits from, if it is not that itself."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "class": self.cls,
            "status": self.status,
            "calls": self.calls,
            "reason": self.reason,
            **({"base": self.base} if self.base else {}),
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one tensor is from another. The reference is what relative numbers are relative to."""

    elements: int
    equal: bool
    """Bit for bit."""
    exact: bool
    """Measured on all elements; else estimated from sketches, where only the first four numbers are known."""
    rel_l2: float
    """|candidate - reference| / |reference|."""
    rel_l2_bar: float
    """Half-width of a 95 % interval around rel_l2; 0 where exact."""
    cosine: float
    l2: float
    """|candidate - reference|."""
    max_abs: float = float("nan")
    max_abs_index: tuple[int, ...] | None = None
    """Where the greatest difference is, as an index into the tensor."""
    reference_value: float = float("nan")
    candidate_value: float = float("nan")
    max_ulp: float = float("nan")
    """The greatest distance in units in the last place of the coarser dtype."""
    mismatched: float = float("nan")
    """Share of elements outside atol + rtol * |reference|."""
    row_rel_l2: float = float("nan")
    """The same as rel_l2 of the row along the last dimension that is furthest off, relative to that row."""
    row_index: tuple[int, ...] | None = None
    """Where that row is, as an index into the tensor; () if the tensor is one row."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A place where the candidate went wrong by its own doing: its inputs were still right."""

    key: Key
    rank: int
    cls: str
    status: str
    """diverged | nonfinite | shape; of gradients also missing, if one never comes though the reference has it, and
    extra, if one comes that the reference does not have"""
    difference: Difference | None
    tolerance: float
    rule: str
    """Which rule judged it, in words."""
    inputs_matched: bool | None
    """Whether the inputs that could be judged are right; None if none was recorded, or none could be judged."""
    container: str | None = None
    """The module in whose own code the value was born, if it appeared between two modules."""
    inputs_rel_l2: float = float("nan")
    """The worst relative error among the inputs; a row's counts as what it would be of the whole."""
    row_tolerance: float = float("nan")
    """What was allowed of a single row."""
    counterpart: str | None = None
    """What the candidate calls the module to look at, if it has another name there."""
    arguments: tuple[ArgumentDifference, ...] = ()
    """The plain arguments in which its call differs."""
    unjudged: tuple[Key, ...] = ()
    """What it was made from and could not be judged, as inputs whose summaries tell too little."""
    enters: bool = False
    """Whether it is a gradient that the code outside the model has made, as the loss does."""

    @property
    def module(self) -> str:
        """The module to look at: the container where the value appeared between modules, else the module itself."""
        return self.key.module if self.container is None else self.container

    @property
    def rel_l2(self) -> float:
        return self.difference.rel_l2 if self.difference is not None else float("nan")

    @property
    def only_a_row(self) -> bool:
        """Whether the whole would be near enough, and it is one row that is off."""
        row = self.difference.row_rel_l2 if self.difference is not None else float("nan")
        return self.status == "diverged" and self.rel_l2 <= self.tolerance and row > self.row_tolerance

    @property
    def cosine(self) -> float:
        return self.difference.cosine if self.difference is not None else float("nan")

    @property
    def max_abs(self) -> float:
        return self.difference.max_abs if self.difference is not None else float("nan")


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A record that only one side has."""

    side: Literal["reference", "candidate"]
    key: Key
    rank: int
    cls: str
    why: str = ""
    """Why nothing on the other side belongs to it, where names were mapped."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two runs in, this out. `str()` of it is the sentence."""

    reference: str
    candidate: str
    verdict: Verdict
    sentence: str
    first: Finding | None
    births: Sequence[Finding]
    counts: Mapping[str, int]
    """Pairs by status, and "unmatched"."""
    unmatched: Sequence[Unmatched]
    table: Any
    """All pairs as a pyarrow.Table in the reference's execution order; `report` documents its columns."""
    policy: str
    """The tolerance, in words."""
    notes: Sequence[str] = ()
    """What a reader should know beside the verdict: unfinished runs, coverage, suggested renames, what to try next."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """run.json of both sides, under "reference" and "candidate"."""
    details: Sequence[Detail] = ()
    """Pairs that were looked at closely, if that was asked for; those worth most first."""
    options: Sequence[str] | None = ()
    """Options of `tensortap compare` that it was made with, so that a command can be told that shows the same. None if
    no command can: a side was there for the comparison alone."""
    mapping: NameMapping | None = None
    """How names and layouts were mapped; None where both sides speak the same language."""
    isolated: bool = False
    """Whether every module worked on the reference's own inputs, so that each birth is a fault of its own."""
    unpaired_ranks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Ranks of each side ("reference", "candidate") that take part and were not compared: they have no counterpart."""

    def __str__(self) -> str:
        return self.sentence

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def rows(self) -> Iterator[dict[str, Any]]:
        """Every pair as a dict, in execution order, without holding all of them."""
        for batch in self.table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison to a file, and return its path. The suffix selects the format.

        .html is the page of `tensortap report`; pass `details=` to `compare` for drill-downs in it. .json holds
        everything, .csv and .parquet all pairs, .xml is JUnit, and .md is a summary for a ticket or a comment.
        The file appears when it is complete. Raise UsageError for any other suffix.

        >>> result.save("report.html")
        PosixPath('report.html')
        """
        return reports().save_comparison(self, path)

    def _repr_html_(self) -> str:
        return reports().comparison_html(self)


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """Where something that is usually a mistake first shows in a run."""

    row: int
    key: Key
    rank: int
    cls: str
    status: str
    """One of HEALTH_STATUSES, not "ok"."""
    text: str


@dataclass(frozen=True, eq=False)
class HealthReport:
    """One run in, this out. `str()` of it is the sentence."""

    path: str
    verdict: Literal["healthy", "suspicious", "empty"]
    """Empty where there is no record to look at."""
    sentence: str
    policy: str
    """What counts as suspicious, in words."""
    births: Sequence[HealthFinding]
    """In execution order."""
    counts: Mapping[str, int]
    """Records by status."""
    table: Any
    """All records as a pyarrow.Table by rank and in execution order: the columns of the index without sketch and file,
    with rank, status and birth."""
    details: Sequence[Detail] = ()
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        return self.sentence

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def _repr_html_(self) -> str:
        return reports().health_html(self)

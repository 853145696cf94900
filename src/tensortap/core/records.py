"""Plain data classes that all packages share. They have no behaviour beyond naming and arithmetic on their fields."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from tensortap.core.causes import CAUSES
from tensortap.core.presentation import reports
from tensortap.core.statistics import STORED

if TYPE_CHECKING:
    from tensortap.core.arguments import ArgumentDifference
    from tensortap.core.causes import Cause
    from tensortap.core.details import Detail
    from tensortap.core.name_mapping import NameMapping
    from tensortap.core.operator_paths import OperatorPlace
    from tensortap.core.placement import Placement

__all__ = [
    "ALL_FROZEN",
    "EXIT_CODES",
    "GRADIENT_KINDS",
    "HEALTH_STATUSES",
    "KINDS",
    "MODULE_KINDS",
    "PHASES",
    "RIGHT_STATUSES",
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
    "LayoutFact",
    "Location",
    "PairStatus",
    "Phase",
    "Record",
    "Statistics",
    "Status",
    "Summary",
    "TruthErrors",
    "Unmatched",
    "Verdict",
    "display_name",
]

Phase = Literal["forward", "backward", "state", "eval"]
Kind = Literal["input", "output", "grad_input", "grad_output", "param", "param_grad", "step_grad", "buffer", "operator"]
Status = Literal["seen", "never called", "no gradient", "alias", "skipped"]

PairStatus = Literal["equal", "close", "diverged", "nonfinite", "shape", "unjudged"]
Verdict = Literal["match", "imprecise", "diverged", "incomparable"]

EXIT_CODES: dict[str, int] = {"match": 0, "diverged": 1, "incomparable": 3, "imprecise": 4}
"""Exit code of a command by verdict. Code 2 means that something cannot be read or written."""

STATUSES: tuple[str, ...] = get_args(PairStatus)
PHASES: tuple[str, ...] = get_args(Phase)
KINDS: tuple[str, ...] = get_args(Kind)
MODULE_KINDS: tuple[str, ...] = tuple(kind for kind in KINDS if kind != "operator")
"""Kinds of records of modules, which `capture(kinds=...)` chooses from."""
ALL_FROZEN = "all its parameters are frozen"
"""Reason in the coverage of a module that gets no gradient."""
RIGHT_STATUSES: tuple[str, ...] = ("equal", "close")
WRONG_STATUSES: tuple[str, ...] = ("diverged", "nonfinite", "shape")
"""Statuses of a wrong pair."""
GRADIENT_KINDS = ("grad_output", "grad_input", "param_grad")
STATE_KINDS = ("param", "buffer", "param_grad", "step_grad")
"""Kinds that belong to a module itself, not to one of its calls."""
HEALTH_STATUSES: tuple[str, ...] = ("ok", "nonfinite", "exploding", "dead", "vanishing")
"""Statuses of a record within one run; `health.examination` defines them."""


class Key(NamedTuple):
    """The identity of a record, the same on every rank and in every framework.

    >>> str(Key(3, 0, "forward", "layers.0.fc1", 0, "output", "0"))
    'layers.0.fc1 · output 0 · forward · step 3'
    """

    step: int
    """Number of `tap.step()` calls before it."""
    micro: int
    """Number of forwards of the root module before it in the step. Evaluation has a count of its own."""
    phase: str
    """forward | backward | state | eval: the forward of an evaluation between training steps."""
    module: str
    """The structural name, wrappers stripped; the root is the empty string."""
    call: int
    """Number of calls of the module before it in the micro step. For param and buffer: 0 before the step, 1 after."""
    kind: str
    """input | output | grad_input | grad_output | param | param_grad | step_grad | buffer | operator"""
    path: str
    """Position in the nested arguments or outputs, or the parameter's own name. For an operator, its name, line and
    count; see `core.operator_paths`."""

    def __str__(self) -> str:
        parts = [display_name(self.module), f"{self.kind} {self.path}", self.phase, f"step {self.step}"]
        if self.micro:
            parts.append(f"micro {self.micro}")
        if self.call:
            parts.append(f"call {self.call}")
        return " · ".join(parts)


def display_name(module: str) -> str:
    """Return a module's name for people: "(root)" for the root, whose name is empty."""
    return module or "(root)"


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """The numbers of a tensor's summary, in the order of `core.statistics.STORED`, which defines each.

    min and max are over the finite elements, the other moments over the ordinary ones, which are not at the edge of the
    dtype's range. Where there is none, they are NaN, and l1 and l2 are 0. A complex tensor counts as its real and
    imaginary parts side by side.
    """

    elements: int
    nan: int
    posinf: int
    neginf: int
    zeros: int
    edge: int
    min: float
    max: float
    mean: float
    std: float
    l1: float
    l2: float
    digest: int
    more: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Statistics that `core.statistics.register` has added, by name; None where a value is unknown."""

    def __getitem__(self, name: str) -> Any:
        """Return a stored statistic by its name; None if this summary lacks it.

        >>> summary["mean"]                                                    # doctest: +SKIP
        0.25
        """
        return getattr(self, name) if name in _STORED else self.more.get(name)

    @property
    def nonfinite(self) -> int:
        return self.nan + self.posinf + self.neginf

    @property
    def finite(self) -> int:
        return self.elements - self.nonfinite

    @property
    def ordinary(self) -> int:
        return self.finite - self.edge


@dataclass(frozen=True, slots=True, eq=False)
class Summary(Statistics):
    """Statistics, digest and sketch of a tensor; `kernels.summary.reference` defines every field."""

    sketch: npt.NDArray[np.float32]


_STORED = frozenset(each.name for each in STORED)


class Location(NamedTuple):
    """Position of a tensor's bytes: a file in the folder of the index, and a span in it."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One tensor, seen once: its identity, its origin and its summary."""

    key: Key
    rank: int
    seq: int
    """Execution order within the rank."""
    cls: str
    """Class name of the module."""
    dtype: str
    shape: tuple[int, ...]
    tensor: int
    """Number of the tensor within the rank. Records with the same number saw the same tensor, unchanged."""
    summary: Summary
    location: Location | None = None
    """None if the bytes were not kept."""
    placement: Placement | None = None
    """Position in the whole, whose digest and sketch the summary is part of. None in a run of one process: it is the
    whole. None in a run of several: unknown."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """One module as the tap saw it, with the reason if it saw less than everything."""

    module: str
    cls: str
    status: Status
    calls: int = 0
    reason: str = ""
    base: str = ""
    """The framework's own class that the module's class inherits from; empty if the class is the framework's own."""

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
    """The measured difference of a pair. Relative numbers are relative to the reference."""

    elements: int
    equal: bool
    """Whether all bits are equal."""
    exact: bool
    """Whether it was measured on all elements. An estimate from sketches has only the first four numbers."""
    rel_l2: float
    """|candidate - reference| / |reference|."""
    rel_l2_bar: float
    """Half-width of a 95 % interval around rel_l2; 0 where exact."""
    cosine: float
    l2: float
    """|candidate - reference|."""
    max_abs: float = float("nan")
    max_abs_index: tuple[int, ...] | None = None
    """Index of the element with the greatest difference."""
    reference_value: float = float("nan")
    candidate_value: float = float("nan")
    max_ulp: float = float("nan")
    """The greatest distance in units in the last place of the coarser dtype."""
    mismatched: float = float("nan")
    """Share of elements outside atol + rtol * |reference|."""
    row_rel_l2: float = float("nan")
    """rel_l2 of the row along the last dimension with the largest relative error."""
    row_index: tuple[int, ...] | None = None
    """Index of that row; () if the tensor is one row."""


@dataclass(frozen=True, slots=True)
class TruthErrors:
    """The distances of both sides from a truth, relative to its size."""

    of: str
    """The truth, in words: "float64", or the path of a run."""
    reference: float
    candidate: float
    roundings: float = float("nan")
    """Number of further roundings that the candidate has; NaN if they cannot be counted, as in float32."""
    of_reference: bool | None = None
    """Whether the reference's own code made the truth; False if the candidate's did, None if a third run has it."""
    exact: bool = True
    """Whether it was measured on all elements, not estimated from sketches."""
    bar: float = 0.0
    """Half-width of a 95 % interval around each distance, relative to it; 0 where exact."""

    @property
    def ratio(self) -> float:
        """The candidate's distance from the truth, as a multiple of the reference's."""
        if not self.reference:
            return float("inf") if self.candidate > 0 else 1.0
        return self.candidate / self.reference


@dataclass(frozen=True, slots=True)
class LayoutFact:
    """The role of the ranks of a parallel run in a finding."""

    axis: str
    """The axis of the mesh; empty if it is not known."""
    ranks: tuple[int, ...]
    """The ranks that are wrong, or that hold the parts."""
    count: int
    """Number of ranks that hold a part, a summand or a replica along the axis."""
    words: str = ""
    """The held object, as words that end a sentence."""
    residual: float = float("nan")
    """The error of the explanation, relative to the reference's record; NaN if it is exact or was not measured."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A record that is wrong although its sources are right, with the cause and the module to inspect."""

    key: Key
    rank: int
    cls: str
    status: str
    """diverged | nonfinite | shape | missing | extra | imprecise | recomputed | replica | layout

    missing, extra: a gradient that only the reference has, or only the candidate. imprecise: within tolerance, and
    further from a truth than the reference's. recomputed: the candidate's recomputation made another value than its own
    first forward. replica: ranks that should hold the same value do not. layout: the parts that its ranks hold do not
    make up the whole.
    """
    cause: Cause
    """The code that made it wrong."""
    difference: Difference | None
    tolerance: float
    rule: str
    """The rule that judged it, in words."""
    inputs_matched: bool | None
    """Whether the inputs that could be judged are right; None if none was recorded, or none could be judged."""
    container: str | None = None
    """The module in whose own code the value was born, if it appeared between two modules."""
    inputs_rel_l2: float = float("nan")
    """The worst relative error among the inputs; that of a single row is scaled to the whole tensor."""
    row_tolerance: float = float("nan")
    """The tolerance of a single row."""
    counterpart: str | None = None
    """The candidate's name of the module to inspect, if it differs."""
    arguments: tuple[ArgumentDifference, ...] = ()
    """The plain arguments in which its call differs."""
    unjudged: tuple[Key, ...] = ()
    """Its sources that could not be judged, such as inputs with too little in their summaries."""
    row: int | None = None
    """Its row in `Comparison.table`; None if only one side has the record."""
    truth: TruthErrors | None = None
    """The distances of both sides from the truth, if one was given."""
    layout: LayoutFact | None = None
    """The axis and ranks that are to blame, if the cause is one of parallel layouts."""
    operator: OperatorPlace | None = None
    """The operator in the module's code at which it begins, if both sides recorded operators."""

    def __str__(self) -> str:
        name = display_name(self.module) + (f" ({self.cls})" if self.cls and self.container is None else "")
        off = "" if math.isnan(self.rel_l2) else f", off by {self.rel_l2:.2g}"
        return f"{name}: {CAUSES[self.cause].label}, {self.key}{off}"

    @property
    def module(self) -> str:
        """The module to inspect: the container where the value appeared between modules, else the module itself."""
        return self.key.module if self.container is None else self.container

    @property
    def rel_l2(self) -> float:
        return self.difference.rel_l2 if self.difference is not None else float("nan")

    @property
    def only_a_row(self) -> bool:
        """Whether the whole tensor is within its tolerance, and only one row is not."""
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
    """Why it has no counterpart, where names were mapped."""


@dataclass(frozen=True, eq=False)
class RankParts:
    """The ranks behind the pairs of a comparison whose records were joined over ranks."""

    side: str
    """The side that the ranks are of: "candidate", or "reference" if only that one has several."""
    axes: tuple[str, ...]
    """Names of the mesh axes; empty if they are not known."""
    coordinates: Mapping[int, tuple[int, ...]]
    """Position of each rank along the axes."""
    holders: Sequence[tuple[int, ...]]
    """Sets of ranks that hold a record together: its shards, replicas or summands."""
    of_pair: Any = field(repr=False)
    """For each pair, the index of its set in `holders`, as an array."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of comparing two runs. `str()` of it is the sentence."""

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
    """Lines that accompany the verdict: unfinished runs, coverage, suggested renames, what to try next."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """run.json of both sides, under "reference" and "candidate"."""
    details: Sequence[Detail] = ()
    """Pairs inspected element by element, if `details=` asked for them; the most important first."""
    options: Sequence[str] | None = ()
    """Options of `tensortap compare` that repeat this comparison. None if no command can repeat it, because a side
    existed only in this process."""
    mapping: NameMapping | None = None
    """The mapping of names and layouts; None if both sides have the same ones."""
    isolated: bool = False
    """Whether every module ran on the reference's own inputs, so that each birth is independent of the others."""
    zoom: Any = None
    """The result of zooming into the module of `first`, if `zoom=` asked for it; a `tensortap.zoom.result.Zoom`."""
    unpaired_ranks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Ranks of each side ("reference", "candidate") that take part and were not compared: they have no counterpart."""
    rank_parts: RankParts | None = field(default=None, repr=False)
    """The ranks that hold a part of each pair, if records were joined over ranks."""

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
    """The first record that shows a likely mistake in a run."""

    row: int
    key: Key
    rank: int
    cls: str
    status: str
    """One of HEALTH_STATUSES, not "ok"."""
    text: str


@dataclass(frozen=True, eq=False)
class HealthReport:
    """The result of examining one run. `str()` of it is the sentence."""

    path: str
    verdict: Literal["healthy", "suspicious", "empty"]
    """"empty" if there is no record to examine."""
    sentence: str
    policy: str
    """Description of what counts as suspicious."""
    births: Sequence[HealthFinding]
    """In execution order."""
    counts: Mapping[str, int]
    """Records by status."""
    table: Any
    """All records as a pyarrow.Table, by rank and in execution order: the columns of the index except sketch and file,
    and rank, status and birth."""
    details: Sequence[Detail] = ()
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        return self.sentence

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def _repr_html_(self) -> str:
        return reports().health_html(self)

"""Find where NaN is born in a run, and layers that are dead, explode or vanish.

A record is

    nonfinite   if it has a NaN or +Inf, or -Inf outside activations, where masks are written as -Inf;
    exploding   if an element is beyond half of what its dtype holds, or its root mean square is FAR times the usual one
                of the step, or GROWN times that of the same tensor over the steps before;
    dead        if it is an output or a gradient, and zero in every element and in every recorded step that is finite;
    vanishing   if it is a gradient, not zero, and its root mean square is FAR times smaller than the usual one.

The usual size is the median of all records of a kind in the step; for gradients that flow from module to module, the
size that backward began with. The first status that applies counts. Integers, single elements and parameter gradients
of one dimension, which may cancel out, neither explode nor vanish nor die.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap.compare.align.side import Scope, Side
from tensortap.compare.details.pairs import unreadable_tensors
from tensortap.compare.details.records import RecordDetails
from tensortap.compare.judge.recomputations import changed_recomputations, key_of
from tensortap.compare.judge.structure import Structure
from tensortap.compare.sources import Source, open_source
from tensortap.core import dtypes
from tensortap.core.records import GRADIENT_KINDS, HEALTH_STATUSES, HealthFinding, HealthReport, display_name
from tensortap.health.replicas import LAYOUT, REPLICA, find_layout_problems

__all__ = ["FAR", "GROWN", "open_health_report"]

FAR = 1e4
RECOMPUTED = "recomputed"
"""Status of a finding whose record is right, and recomputed otherwise in backward."""
GROWN = 100.0
_HISTORY = 3  # minimum number of earlier steps for a median
_MOST = 1000
_ACTIVATIONS = ("input", "output")
_FLOWING = ("grad_input", "grad_output")
_MADE = ("output", *GRADIENT_KINDS)
_LOWEST = [ends[0] for name in dtypes.NAMES if (ends := dtypes.range_of(name)) is not None]
_LEFT_OUT = ("sketch", "file", "offset", "nbytes")
_POLICY = (
    "Suspicious: a NaN or Inf, an element beyond half of its dtype's range (except in masks), a root mean square "
    f"{FAR:,.0f} times larger or, in gradients, smaller than usual in the step, {GROWN:g} times larger than before, "
    "or all zeros; ranks whose replicas of a value differ, or whose parts do not make up a tensor"
)
_WORDS = {
    "nonfinite": "has {nan:,} NaN and {inf:,} Inf among {elements:,} elements",
    "exploding": "reaches {absmax:.2g}, root mean square {rms:.2g}",
    "dead": "is zero in every element and every recorded step",
    "vanishing": "has a root mean square of {rms:.2g}",
}

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]


def open_health_report(
    source: Source, scope: Scope, opened: ExitStack, details: int = 0
) -> tuple[HealthReport, RecordDetails]:
    """Return the report, and an inspector of its records that works as long as the run is open."""
    side = Side(open_source(source, opened), scope)
    status = _judge(side)
    of_ranks, notes = find_layout_problems(side)
    births = [*of_ranks, *_recomputed(side), *_births(side, status)]
    inspector = RecordDetails(side)
    counts = Counter(HEALTH_STATUSES[code] for code in status.tolist())
    found = HealthReport(
        path=str(side.run.path),
        verdict="suspicious" if births else "healthy" if len(side) else "empty",
        sentence=_sentence(births, side, status),
        policy=_POLICY,
        births=births,
        counts=counts,
        table=_table(side, status, [birth.row for birth in births]),
        notes=notes,
    )
    if details and len(side):
        looked = list(inspector.details([birth.row for birth in births], details))
        found = replace(found, details=looked, notes=[*notes, *unreadable_tensors(looked)])
    return found, inspector


@dataclass(frozen=True)
class _Sizes:
    """The sizes of every record, as far as judging needs them."""

    finite: Codes
    rms: Floats
    absmax: Floats

    @classmethod
    def of(cls, side: Side) -> _Sizes:
        finite = side.elements - side.nan - side.posinf - side.neginf
        with np.errstate(all="ignore"):
            rms = side.l2 / np.sqrt(np.maximum(finite - side.edge, 1))
            absmax = np.maximum(np.abs(side.min), np.abs(side.max))
        return cls(finite, rms, np.nan_to_num(absmax, nan=0.0))


def _judge(side: Side) -> Codes:
    """Return for each record the index of its status in HEALTH_STATUSES."""
    status = np.zeros(len(side), np.int64)
    if not len(side):
        return status
    numbers = _Sizes.of(side)
    is_a = {
        kind: np.isin(side.kind.codes, [at for at, w in enumerate(side.kind.words) if w == kind])
        for kind in side.kind.words
    }
    gradient = _any([is_a.get(kind) for kind in GRADIENT_KINDS], len(side))
    made = _any([is_a.get(kind) for kind in _MADE], len(side))
    activation = _any([is_a.get(kind) for kind in _ACTIVATIONS], len(side))
    dimensions = np.diff(side.shapes.offsets.to_numpy())
    limits = np.array([_half_of_range(name) for name in side.dtype.words])[side.dtype.codes]
    # A sum over all positions may cancel out, as the gradient of a bias does; one number has no typical size.
    # Additive masks hide elements with the lowest number of a dtype, as others do with -inf.
    masked = activation & np.isin(side.min, _LOWEST)
    judged = (
        np.isfinite(limits)
        & ~masked
        & (side.elements > 1)
        & ~(is_a.get("param_grad", np.zeros(len(side), bool)) & (dimensions < 2))
    )
    usual = _usual(side, numbers, judged)
    absmax = np.where(masked, np.abs(side.max), numbers.absmax)
    with np.errstate(invalid="ignore"):
        large = (numbers.rms > FAR * usual) | (numbers.rms > GROWN * _before(side, numbers.rms))
        small = gradient & (numbers.rms > 0) & (numbers.rms * FAR < usual)
        status[judged & small] = HEALTH_STATUSES.index("vanishing")
        zero = side.zeros == side.elements
        status[judged & made & zero & _always(side, zero | (numbers.finite < side.elements))] = HEALTH_STATUSES.index(
            "dead"
        )
        status[(judged & made & large) | (absmax > limits)] = HEALTH_STATUSES.index("exploding")
    bad = (side.nan > 0) | (side.posinf > 0) | ((side.neginf > 0) & ~activation)
    status[bad] = HEALTH_STATUSES.index("nonfinite")
    if "operator" in is_a:  # code may compute what it then leaves out: its module's own records decide
        status[is_a["operator"]] = 0
    return status


def _any(masks: Sequence[npt.NDArray[np.bool_] | None], count: int) -> npt.NDArray[np.bool_]:
    found = np.zeros(count, bool)
    for mask in masks:
        if mask is not None:
            found |= mask
    return found


def _half_of_range(dtype: str) -> float:
    """NaN for integers, which do not explode."""
    kind = dtypes.numpy_dtype(dtype)
    if kind.kind in "iub":
        return float("nan")
    part = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    return float(ml_dtypes.finfo(dtypes.numpy_dtype(part)).max) / 2


def _usual(side: Side, numbers: _Sizes, judged: npt.NDArray[np.bool_]) -> Floats:
    """Return the usual root mean square for each record. Zero tensors do not count.

    For a gradient that flows, it is that of the step's first one, where backward began. For all other records, it is
    the median of their kind in the step.
    """
    _, group = np.unique(np.stack([side.rank, side.step, side.kind.codes]), axis=1, return_inverse=True)
    known = np.where(judged & (numbers.rms > 0), numbers.rms, np.nan)
    usual = _medians(known, group.reshape(-1))
    flows = np.isin(side.kind.codes, [at for at, word in enumerate(side.kind.words) if word in _FLOWING])
    _, scope = np.unique(np.stack([side.rank, side.step]), axis=1, return_inverse=True)
    scope = scope.reshape(-1)
    rows = np.flatnonzero(flows & ~np.isnan(known))
    rows = rows[np.argsort(side.seq[rows], kind="stable")]
    scopes, first = np.unique(scope[rows], return_index=True)
    began = np.full(int(scope.max(initial=-1)) + 1, np.nan)
    began[scopes] = known[rows[first]]
    return np.where(flows, began[scope], usual)


def _medians(values: Floats, group: Codes) -> Floats:
    """Return the median of each row's group; NaN where no value is known."""
    order = np.lexsort((values, group))
    known = order[~np.isnan(values[order])]
    groups, first, count = np.unique(group[known], return_index=True, return_counts=True)
    found = np.full(int(group.max(initial=-1)) + 1, np.nan)
    found[groups] = values[known[first + count // 2]]
    return found[group]


def _series(side: Side) -> Codes:
    """Return numbers that are equal for records that differ in their step only."""
    columns = [side.rank, side.micro, side.call]
    columns += [names.codes for names in (side.module, side.phase, side.kind, side.path)]
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1)


def _always(side: Side, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return the mask, restricted to tensors for which it holds in all steps."""
    series = _series(side)
    holds = np.ones(int(series.max(initial=-1)) + 1, bool)
    holds[series[~mask]] = False
    return holds[series]


def _before(side: Side, rms: Floats) -> Floats:
    """Return the median root mean square of the same tensor over earlier steps; inf while these are few."""
    series = _series(side)
    found = np.full(len(rms), np.inf)
    order = np.lexsort((side.step, series))
    cuts = np.flatnonzero(np.diff(series[order], prepend=-1))
    for begin, end in zip(cuts.tolist(), [*cuts[1:].tolist(), len(order)], strict=True):
        rows = order[begin:end]
        if end - begin <= _HISTORY or not rms[rows].max() > GROWN * rms[rows].min():
            continue  # no value in it can have grown that much
        before: list[float] = []  # in order
        for place, (row, size) in enumerate(zip(rows.tolist(), rms[rows].tolist(), strict=True)):
            if place >= _HISTORY:
                usual = (before[(place - 1) // 2] + before[place // 2]) / 2
                found[row] = usual if usual > 0 else np.inf
            insort(before, size)
    return found


def _recomputed(side: Side) -> list[HealthFinding]:
    """Return a finding for each module that recomputes other values than its first forward made."""
    found = []
    for rank, fact in changed_recomputations(side):
        key = key_of(fact)
        rows = np.flatnonzero(
            (side.rank == rank)
            & (side.step == key.step)
            & side.module.among((key.module,))
            & side.kind.among((key.kind,))
        )
        if len(rows) and (same := [row for row in rows.tolist() if side.key(row) == key]):
            words = "is not what the first forward made, when backward recomputes it" + (
                f" in {display_name(fact.of)}" if fact.of != key.module else ""
            )
            found.append(HealthFinding(same[0], key, rank, side.cls[same[0]], RECOMPUTED, words))
    return found


def _births(side: Side, status: Codes) -> list[HealthFinding]:
    """Return the findings.

    These are each NaN that did not propagate from another record, and the first dead row of each module. Exploding and
    vanishing mostly propagate from module to module, so only the first such row of each rank is a finding.
    """
    rows = np.flatnonzero(status)
    propagated = _propagation(side, status == HEALTH_STATUSES.index("nonfinite"))
    chosen, known = [], set()
    for row in rows[np.lexsort((side.seq[rows], side.step[rows]))].tolist():
        if HEALTH_STATUSES[status[row]] == "nonfinite":
            if propagated(row):
                continue
        else:
            dead = HEALTH_STATUSES[status[row]] == "dead"
            spot = (HEALTH_STATUSES[status[row]], int(side.module.codes[row] if dead else side.rank[row]))
            if spot in known:
                continue
            known.add(spot)
        chosen.append(row)
        if len(chosen) == _MOST:
            break
    return [_finding(side, row, HEALTH_STATUSES[status[row]]) for row in chosen]


def _propagation(side: Side, bad: npt.NDArray[np.bool_]) -> Callable[[int], bool]:
    """Return a function that returns whether the NaN of a row propagated from another record.

    The NaN may come from a source, through the loss, or from the step before through unrecorded parameters.
    """
    structure = Structure(side, np.arange(len(side)))
    forward = [word == "forward" for word in side.phase.words]
    wrong = np.flatnonzero(bad)
    steps = {(int(side.rank[row]), int(side.step[row])) for row in wrong}
    in_forward = {(int(side.rank[row]), int(side.step[row])) for row in wrong if forward[int(side.phase.codes[row])]}
    before = dict(zip(side.run.steps[1:], side.run.steps, strict=False))

    def answer(row: int) -> bool:
        rank, step = int(side.rank[row]), int(side.step[row])
        if (rank, before.get(step, -1)) in steps:
            return True
        if not forward[int(side.phase.codes[row])] and (rank, step) in in_forward:
            return True
        sources = [source for source in structure.sources(row) if source < row]
        return structure.first_seen[row] < row or any(bad[source] for source in sources)

    return answer


def _finding(side: Side, row: int, status: str) -> HealthFinding:
    numbers = {name: float(getattr(side, name)[row]) for name in ("min", "max", "l2")}
    counts = {name: int(getattr(side, name)[row]) for name in ("elements", "nan", "posinf", "neginf")}
    inf = counts["posinf"] + counts["neginf"]
    words = _WORDS[status].format(
        nan=counts["nan"],
        inf=inf,
        elements=counts["elements"],
        absmax=max(abs(numbers["min"]), abs(numbers["max"])),
        rms=numbers["l2"] / max(1, counts["elements"] - counts["nan"] - inf) ** 0.5,
    )
    return HealthFinding(row, side.key(row), int(side.rank[row]), side.cls[row], status, words)


def _sentence(births: Sequence[HealthFinding], side: Side, status: Codes) -> str:
    if not len(side):
        return "There is nothing to examine: no record of the run matches the selection."
    if not births:
        return f"Nothing is suspicious: all {len(side):,} records are finite, and no layer is dead or explodes."
    first = next((birth for birth in births if birth.status == "nonfinite"), births[0])
    cls = f" ({first.cls})" if first.cls else ""
    what = f"{first.key.kind} {first.key.path} of {display_name(first.key.module)}{cls} in step {first.key.step}"
    if first.status in (REPLICA, LAYOUT):
        return f"{first.text}."
    if first.status == RECOMPUTED:
        return f"A recomputation differs: {what} {first.text}. A random state, or a mode such as autocast, was lost."
    if first.status == "nonfinite":
        return f"NaN or Inf is born in {what}: it {first.text}."
    modules = len(np.unique(side.module.codes[status == HEALTH_STATUSES.index(first.status)]))
    more = f" So it is in {modules:,} modules." if modules > 1 else ""
    return f"A layer is {first.status}: {what} {first.text}.{more}"


def _table(side: Side, status: Codes, births: Sequence[int]) -> Any:
    born = np.zeros(len(side), bool)
    born[list(births)] = True
    table = side.table.drop_columns([name for name in _LEFT_OUT if name in side.table.column_names])
    columns = {
        "rank": pa.array(side.rank, pa.int64()),
        **{name: table.column(name) for name in table.column_names},
        "status": pa.DictionaryArray.from_arrays(pa.array(status), pa.array(HEALTH_STATUSES)).cast(pa.string()),
        "birth": pa.array(born),
    }
    return pa.table(columns)

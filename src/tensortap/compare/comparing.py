"""The comparison from end to end: open, align, measure, judge, say."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare import sentence
from tensortap.compare.align import Alignment, Renames, align, suggest
from tensortap.compare.closeups import Closeups, worth_a_look
from tensortap.compare.judge import Judgement, Pairs, judge
from tensortap.compare.map_file import read_map
from tensortap.compare.mapped import (
    Allowance,
    allowances,
    frameworks_differ,
    other_names,
    plan_of,
    reference_name,
    say_what_is_known,
    without_ignored,
    words_of,
)
from tensortap.compare.metrics import Measures, estimate, prepare
from tensortap.compare.pairs_table import table_of
from tensortap.compare.side import Scope, Side
from tensortap.compare.structure import Structure
from tensortap.compare.tensors import measure_tensors
from tensortap.compare.tolerance import Policy
from tensortap.compare.translated import Translated
from tensortap.compare.verdict import findings
from tensortap.errors import UsageError
from tensortap.kernels import summarize
from tensortap.kernels.pair_device import PairDevice
from tensortap.mapping.plan import Plan
from tensortap.records import KINDS, Comparison, Finding, Unmatched, Verdict
from tensortap.store import Run
from tensortap.store.formats import open_any

__all__ = ["Request", "Source", "open_comparison", "open_source", "run_comparison"]

Source = str | os.PathLike[str] | Run
_MOST_UNMATCHED = 10_000
_LEAST_SHARE = 0.1
_FIRST_PART = 256


@dataclass(frozen=True)
class Request:
    """What was asked; see `tensortap.compare`."""

    reference: Source
    candidate: Source
    rename: tuple[str, ...] = ()
    map_file: str | os.PathLike[str] | None = None
    mapping: str | os.PathLike[str] | Mapping[str, Any] | None = None
    steps: Collection[int] | Mapping[int, int] | None = None
    ranks: Collection[int] | Mapping[int, int] | None = None
    modules: str | Collection[str] | None = None
    kinds: str | Collection[str] | None = None
    rtol: float | None = None
    atol: float | None = None
    noise: tuple[Source, ...] = ()
    until_first: bool = False
    workers: int | None = None
    device: str = "cpu"
    details: int = 0
    progress: Callable[[int, int], None] | None = None

    @property
    def options(self) -> list[str] | None:
        """What on the command line decides which records belong together and what is allowed; None if it cannot be
        said there, as rules that are in no file."""
        maps = [given for given in (self.map_file, self.mapping) if given is not None]
        if len(maps) > 1 or (self.mapping is not None and not str(self.mapping).endswith(".toml")):
            return None
        found = [("rename", rule) for rule in self.rename]
        found += [("noise", str(each.path if isinstance(each, Run) else each)) for each in self.noise]
        found += [
            (name, repr(given)) for name, given in (("rtol", self.rtol), ("atol", self.atol)) if given is not None
        ]
        found += [("map", str(given)) for given in maps]
        if isinstance(self.steps, Mapping) and any(ours != theirs for ours, theirs in self.steps.items()):
            found.append(("step", ",".join(f"{ours}:{theirs}" for ours, theirs in self.steps.items())))
        return [part for name, value in found for part in (f"--{name}", value)]


@dataclass(frozen=True)
class _Matched:
    """Two sides, aligned and measured."""

    reference: Side
    candidate: Side
    alignment: Alignment
    measures: Measures
    plan: Plan | None = None
    """How the candidate's names and layouts were mapped; None where they were not."""

    @cached_property
    def allowed(self) -> dict[int, Allowance]:
        """Pairs that are allowed more than others."""
        if self.plan is None or not isinstance(self.candidate, Translated):
            return {}
        return allowances(self.reference, self.candidate, self.alignment, self.plan)


def run_comparison(request: Request) -> Comparison:
    with ExitStack() as opened:
        return open_comparison(request, opened)[0]


def open_comparison(request: Request, opened: ExitStack) -> tuple[Comparison, Closeups]:
    """The comparison, and what looks at its pairs closely for as long as the runs are open."""
    renames = Renames.of(request.rename, read_map(request.map_file))
    kinds = (request.kinds,) if isinstance(request.kinds, str) else request.kinds or ()
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UsageError(f"kinds: {unknown[0]!r} is not a kind; there are {', '.join(KINDS)}")
    device = _device(request)
    reference, candidate = open_source(request.reference, opened), open_source(request.candidate, opened)
    plan = plan_of(reference, candidate, renames, request.mapping)
    matched = _match(reference, candidate, renames, request, request.progress, device, plan)
    noise = _noise(reference, matched, request, opened, device)
    policy = Policy(request.rtol, request.atol, noise, mapped=frameworks_differ(reference, candidate))
    structure = Structure(matched.reference, matched.alignment.reference, policy.mapped)
    pairs = _pairs(matched)
    judgement = judge(pairs, structure, policy, _moved(matched))
    say_what_is_known(judgement, matched.measures.bounded, matched.allowed)
    closeups = Closeups(
        matched.reference, matched.candidate, matched.alignment, matched.measures, (request.rtol, request.atol)
    )
    comparison = replace(_conclude(matched, structure, judgement, policy, renames), options=request.options)
    if request.details and len(comparison):
        chosen = worth_a_look(judgement.born, pairs.error, judgement.tolerance, request.details)
        details = list(closeups.details(chosen, request.details, request.progress))
        comparison = replace(comparison, details=details)
    return comparison, closeups


def _device(request: Request) -> PairDevice | None:
    """Where whole tensors are measured; None is this machine's processor."""
    if request.device == "cpu":
        return None
    if request.workers is not None:
        raise UsageError(f"workers measure on the CPU: leave them out with device={request.device!r}")
    from tensortap.frameworks import pair_device  # may load torch

    return pair_device(request.device)


def _match(
    reference: Run,
    candidate: Run,
    renames: Renames,
    request: Request,
    progress: Callable[[int, int], None] | None,
    device: PairDevice | None,
    plan: Plan | None = None,
) -> _Matched:
    left = Side(reference, _scope(request, None, state_only=candidate.is_checkpoint))
    known = renames if plan is None else partial(reference_name, plan)
    right = Side(candidate, _scope(request, known, state_only=reference.is_checkpoint))
    steps = _mapping(request.steps) if not (reference.is_checkpoint or candidate.is_checkpoint) else None
    rename = renames if renames else None
    if plan is not None:
        right, rename = (
            Translated(right, plan, kinds_known=not (reference.is_checkpoint or candidate.is_checkpoint)),
            None,
        )
    alignment = align(left, right, rename, steps, _mapping(request.ranks))
    if plan is not None:
        alignment = without_ignored(alignment, left, plan)
    measures = prepare(left, right, alignment)
    open_pairs = measures.open
    whole = left.kept[alignment.reference[open_pairs]] & right.kept[alignment.candidate[open_pairs]]
    estimate(measures, left, right, alignment, open_pairs[~whole])
    found = _Matched(left, right, alignment, measures, plan)
    tolerances = (request.rtol, request.atol)
    stops = request.until_first and not request.noise  # with noise, what counts as parted is known only at the end
    if stops:
        progress = None  # nobody knows how far it will go
    for part, last in _parts(found, open_pairs[whole], stops):
        measured = measure_tensors(left, right, alignment, part, tolerances, request.workers, progress, device)
        for pair, measure in measured:
            measures.take(pair, measure)
        if stops and _parted(found, last, request):
            break
    return found


def _parts(
    matched: _Matched, pairs: npt.NDArray[np.int64], until_first: bool
) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
    """All at once, or in execution order over all ranks in parts that grow, each with the pair it goes up to. What
    another pair saw of the same two tensors goes with them."""
    if not until_first:
        yield pairs, -1
        return
    left, right = matched.alignment.reference[pairs], matched.alignment.candidate[pairs]
    order = np.lexsort((matched.reference.seq[left], matched.reference.step[left]))
    tensors = np.stack([matched.reference.tensor_id[left], matched.candidate.tensor_id[right]])[:, order]
    pairs, same = pairs[order], np.unique(tensors, axis=1, return_inverse=True)[1].reshape(-1)
    begin, size, done = 0, _FIRST_PART, np.zeros(len(pairs), bool)
    while begin < len(pairs):
        part = np.isin(same, same[begin : begin + size]) & ~done
        done |= part
        yield pairs[part], int(pairs[: begin + size][-1])
        begin, size = begin + size, 2 * size


def _parted(matched: _Matched, last: int, request: Request) -> bool:
    """Whether the runs have parted up to a pair. What was not measured yet is not judged."""
    side, rows = matched.reference, matched.alignment.reference
    mapped = frameworks_differ(side.run, matched.candidate.run)
    policy = Policy(request.rtol, request.atol, mapped=mapped)
    born = judge(_pairs(matched), Structure(side, rows, mapped), policy, _moved(matched)).born

    def when(pair: int) -> tuple[int, int]:
        return int(side.step[rows[pair]]), int(side.seq[rows[pair]])

    return any(when(pair) <= when(last) for pair in born)


def _pairs(matched: _Matched) -> Pairs:
    left, right, alignment, measures = matched.reference, matched.candidate, matched.alignment, matched.measures
    rows, partners = alignment.reference, alignment.candidate
    base = np.array([[Policy.base(a, b) for b in right.dtype.words] for a in left.dtype.words])
    kinds = np.array([Policy.lengthening(kind) for kind in left.kind.words])
    error = _errors(matched)
    error[measures.nonfinite | measures.reshaped] = np.inf
    return Pairs(
        error=error,
        row_gain=Policy.row_gain(left.row_length[rows]) if len(rows) else np.empty(0),
        l2=measures.sides["reference"]["l2"],
        elements=measures.sides["reference"]["elements"],
        equal=measures.equal,
        nonfinite=measures.nonfinite & ~measures.equal,
        reshaped=measures.reshaped,
        dimensions=_dimensions(left)[rows] if len(rows) else np.empty(0, np.int64),
        base=_more(base[left.dtype.codes[rows], right.dtype.codes[partners]] * kinds[left.kind.codes[rows]], matched)
        if len(rows)
        else np.empty(0),
    )


def _errors(matched: _Matched) -> npt.NDArray[np.float64]:
    """What is judged of each pair: the error of the whole, or that of its worst row, scaled to be judged alike."""
    measures, rows = matched.measures, matched.alignment.reference
    if not len(rows):
        return np.empty(0)
    return np.fmax(measures.rel_l2, measures.row_rel_l2 / Policy.row_gain(matched.reference.row_length[rows]))


def _more(base: npt.NDArray[np.float64], matched: _Matched) -> npt.NDArray[np.float64]:
    for pair, allowed in matched.allowed.items():
        base[pair] = max(base[pair] * allowed.times, allowed.at_least)
    return base


def _moved(matched: _Matched) -> Callable[[int, int], float]:
    """How far apart two records of the reference are, by their sketches."""
    side, rows = matched.reference, matched.alignment.reference
    cache: list[Any] = []

    def moved(before: int, after: int) -> float:
        cache[:] = cache or side.sketches()
        matrix, which = cache
        left, right = (int(which[rows[pair]]) for pair in (before, after))
        norm = float(side.l2[rows[before]])
        if left < 0 or right < 0 or not norm:
            return 1.0
        return float(np.linalg.norm(matrix[left].astype(np.float64) - matrix[right])) / norm

    return moved


def _dimensions(side: Side) -> npt.NDArray[np.int64]:
    offsets = side.shapes.offsets.to_numpy()
    return np.asarray(np.diff(offsets), np.int64)


def _noise(
    reference: Run, matched: _Matched, request: Request, opened: ExitStack, device: PairDevice | None
) -> npt.NDArray[np.float64] | None:
    """For every pair, the worst error among further runs of the reference."""
    if not request.noise:
        return None
    worst = np.zeros(len(matched.alignment.reference))
    place = {int(row): pair for pair, row in enumerate(matched.alignment.reference)}
    for source in request.noise:
        again = _match(reference, open_source(source, opened), Renames(), request, None, device)
        errors = np.nan_to_num(_errors(again), nan=0.0, posinf=0.0)
        for row, error in zip(again.alignment.reference.tolist(), errors.tolist(), strict=True):
            if row in place:
                worst[place[row]] = max(worst[place[row]], error)
    return worst


def _conclude(
    matched: _Matched, structure: Structure, judgement: Judgement, policy: Policy, renames: Renames
) -> Comparison:
    left, right, alignment, measures = matched.reference, matched.candidate, matched.alignment, matched.measures
    rows = alignment.reference
    born = findings(
        judgement,
        structure,
        key=lambda pair: left.key(int(rows[pair])),
        cls=lambda pair: left.cls[int(rows[pair])],
        difference=measures.difference,
        theirs={} if matched.plan is None else other_names(matched.plan),
    )
    births = list(born.values())
    counts = Counter(judgement.status)
    one_sided = len(alignment.only_reference) + len(alignment.only_candidate)
    if one_sided:
        counts["unmatched"] = one_sided
    pairs = len(rows)
    verdict: Verdict = "diverged" if births else "match"
    if pairs < _LEAST_SHARE * max(1, min(len(left), len(right))) or not pairs:
        verdict = "incomparable"
    first = births[0] if births and verdict == "diverged" else None
    notes = _notes(matched, renames, verdict, births)
    return Comparison(
        reference=str(left.run.path),
        candidate=str(right.run.path),
        verdict=verdict,
        sentence=_sentence(verdict, first, born, matched, judgement, counts),
        first=first,
        births=births,
        counts=dict(counts),
        unmatched=_unmatched(matched),
        table=table_of(left, right, alignment, measures, judgement, born),
        policy=policy.described(),
        notes=notes,
        info={"reference": left.run.info, "candidate": right.run.info},
        mapping=None if matched.plan is None else matched.plan.report(),
    )


def _sentence(
    verdict: str,
    first: Finding | None,
    born: Mapping[int, Finding],
    matched: _Matched,
    judgement: Judgement,
    counts: Mapping[str, int],
) -> str:
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    if verdict == "incomparable":
        return sentence.too_little(len(left), len(right), len(alignment.reference))
    if first is None:
        if not counts.get("close"):
            return sentence.matched(counts, None)
        worst = int(np.argmax(np.where(np.array(judgement.status) == "close", matched.measures.rel_l2, -1.0)))
        key = left.key(int(alignment.reference[worst]))
        return sentence.matched(counts, (float(matched.measures.rel_l2[worst]), str(key)))
    pair = next(iter(born))
    shapes = left.shape(int(alignment.reference[pair])), right.shape(int(alignment.candidate[pair]))
    counts_of = [matched.measures.sides[side] for side in ("reference", "candidate")]
    ours, theirs = (
        sentence.Tensor(shape, int(side["nan"][pair] + side["inf"][pair]))
        for shape, side in zip(shapes, counts_of, strict=True)
    )
    if left.run.is_checkpoint and right.run.is_checkpoint:
        return sentence.checkpoints(first, len(born), (ours, theirs))
    at_start = first.key.step == int(left.step.min())
    changed = sum(f.key[:1] == first.key[:1] and f.key.kind == "param" and f.key.call == 0 for f in born.values())
    return sentence.parted(
        first,
        changed if at_start else 0,
        (ours, theirs),
        len(left.ranks) > 1,
        _has_forward(left),
        str(right.run.info["framework"]) if frameworks_differ(left.run, right.run) else "the candidate",
    )


def _has_forward(side: Side) -> bool:
    return not {"input", "output"}.isdisjoint(side.kind.words)


def _notes(matched: _Matched, renames: Renames, verdict: str, births: list[Finding]) -> list[str]:
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    notes = [
        f"{name}: {text}" for name, side in (("reference", left), ("candidate", right)) for text in side.run.notices
    ]
    one_sided = len(alignment.only_reference) + len(alignment.only_candidate)
    if matched.plan is not None:
        if births and births[0].cls.startswith("Dropout") and frameworks_differ(left.run, right.run):
            notes.append("dropout draws other numbers in each framework: set its rate to 0 on both sides")
        notes += words_of(matched.plan)
        if len(matched.measures.bounded):
            notes.append(
                'of tensors in another layout a summary tells norms and counts alone; capture with keep="tensors"'
            )
    elif one_sided > len(alignment.reference) // 4 and not renames and (rules := suggest(left, right)):
        options = " ".join(f"--rename '{rule}'" for rule in rules)
        notes.append(f"many names are on one side only; try {options}")
    if births and np.any(~matched.measures.exact & ~np.isnan(matched.measures.rel_l2)):
        notes.append('estimated from sketches; capture with keep="tensors" to measure every element')
    return notes


def _unmatched(matched: _Matched) -> list[Unmatched]:
    found = []
    alignment = matched.alignment
    for name, side, rows in (
        ("reference", matched.reference, alignment.only_reference),
        ("candidate", matched.candidate, alignment.only_candidate),
    ):
        for row in rows[:_MOST_UNMATCHED].tolist():
            key = side.key(row)
            own = int(name == "candidate")
            why = matched.plan.why(own, key.module, key.kind, key.path) if matched.plan is not None else ""
            found.append(Unmatched(name, key, int(side.rank[row]), side.cls[row], why))  # type: ignore[arg-type]
    return found


def open_source(source: Source, opened: ExitStack) -> Run:
    """A run that the caller has open stays open; one that is opened here is closed with the comparison."""
    return source if isinstance(source, Run) else opened.enter_context(open_any(source, summarize))


def _scope(request: Request, renames: Callable[[str], str] | None, state_only: bool) -> Scope:
    """Of the candidate if there are `renames`, even empty ones; else of the reference, whose names patterns mean."""

    def chosen(value: Collection[int] | Mapping[int, int] | None) -> Collection[int] | None:
        if isinstance(value, Mapping):
            return list(value) if renames is None else list(value.values())
        return value

    return Scope(request.modules, request.kinds, chosen(request.steps), chosen(request.ranks), state_only, renames)


def _mapping(value: Any) -> Mapping[int, int] | None:
    return value if isinstance(value, Mapping) else None

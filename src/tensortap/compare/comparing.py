"""The comparison from end to end: open, align, measure, judge, say."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.compare import sentence
from tensortap.compare.align import Alignment, Renames, align, suggest
from tensortap.compare.judge import Judgement, Pairs, judge
from tensortap.compare.metrics import Measures, estimate, prepare
from tensortap.compare.pairs_table import table_of
from tensortap.compare.side import Scope, Side
from tensortap.compare.structure import Structure
from tensortap.compare.tensors import measure_tensors
from tensortap.compare.tolerance import Allowed, Policy
from tensortap.compare.verdict import findings
from tensortap.errors import RunNotFound, RunUnreadable, UsageError
from tensortap.kernels import summarize
from tensortap.kernels.pair_device import PairDevice
from tensortap.records import KINDS, Comparison, Difference, Finding, Key, Unmatched, Verdict
from tensortap.store import Run
from tensortap.store.formats import open_any
from tensortap.store.noise_file import Noise, is_noise, read_noise

__all__ = [
    "Matched",
    "Request",
    "Source",
    "as_one",
    "conclude",
    "moved_in",
    "noise_of",
    "open_source",
    "pairs_of",
    "run_comparison",
]

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
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True)
class Matched:
    """Two sides, aligned and measured."""

    reference: Side
    candidate: Side
    alignment: Alignment
    measures: Measures

    @property
    def describing(self) -> tuple[Callable[[int], Key], Callable[[int], str], Callable[[int], Difference | None]]:
        """A pair's key, its module's class, and how far it is apart."""
        side, rows = self.reference, self.alignment.reference
        return lambda pair: side.key(int(rows[pair])), lambda pair: side.cls[int(rows[pair])], self.measures.difference


def run_comparison(request: Request) -> Comparison:
    renames = Renames.of(request.rename, _read_map(request.map_file))
    kinds = (request.kinds,) if isinstance(request.kinds, str) else request.kinds or ()
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UsageError(f"kinds: {unknown[0]!r} is not a kind; there are {', '.join(KINDS)}")
    device = _device(request)
    with ExitStack() as opened:
        reference, candidate = open_source(request.reference, opened), open_source(request.candidate, opened)
        matched = _match(reference, candidate, renames, request, request.progress, device)
        pairs = pairs_of(matched)
        policy = Policy(request.rtol, request.atol, as_one(noise_of(matched, request, opened, device), pairs.row_gain))
        structure = Structure(matched.reference, matched.alignment.reference)
        judgement = judge(pairs, structure, policy, moved_in(matched))
        return conclude(matched, judgement, findings(judgement, structure, *matched.describing), policy, renames)


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
) -> Matched:
    left = Side(reference, _scope(request, None, state_only=candidate.is_checkpoint))
    right = Side(candidate, _scope(request, renames, state_only=reference.is_checkpoint))
    steps = _mapping(request.steps) if not (reference.is_checkpoint or candidate.is_checkpoint) else None
    alignment = align(left, right, renames if renames else None, steps, _mapping(request.ranks))
    measures = prepare(left, right, alignment)
    open_pairs = measures.open
    whole = left.kept[alignment.reference[open_pairs]] & right.kept[alignment.candidate[open_pairs]]
    estimate(measures, left, right, alignment, open_pairs[~whole])
    found = Matched(left, right, alignment, measures)
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
    matched: Matched, pairs: npt.NDArray[np.int64], until_first: bool
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


def _parted(matched: Matched, last: int, request: Request) -> bool:
    """Whether the runs have parted up to a pair. What was not measured yet is not judged."""
    side, rows = matched.reference, matched.alignment.reference
    born = judge(pairs_of(matched), Structure(side, rows), Policy(request.rtol, request.atol), moved_in(matched)).born

    def when(pair: int) -> tuple[int, int]:
        return int(side.step[rows[pair]]), int(side.seq[rows[pair]])

    return any(when(pair) <= when(last) for pair in born)


def pairs_of(matched: Matched) -> Pairs:
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
        base=base[left.dtype.codes[rows], right.dtype.codes[partners]] * kinds[left.kind.codes[rows]]
        if len(rows)
        else np.empty(0),
    )


def _errors(matched: Matched) -> npt.NDArray[np.float64]:
    """What is judged of each pair: the error of the whole, or that of its worst row, scaled to be judged alike."""
    measures, rows = matched.measures, matched.alignment.reference
    if not len(rows):
        return np.empty(0)
    return np.fmax(measures.rel_l2, measures.row_rel_l2 / Policy.row_gain(matched.reference.row_length[rows]))


def moved_in(matched: Matched) -> Callable[[int, int], float]:
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


def noise_of(matched: Matched, request: Request, opened: ExitStack, device: PairDevice | None = None) -> Allowed | None:
    """For every pair, what measured noise allows: the most among further runs of the reference and noise files."""
    if not request.noise:
        return None
    worst = np.zeros(len(matched.alignment.reference))
    of_rows = worst.copy()
    place = {int(row): pair for pair, row in enumerate(matched.alignment.reference)}
    for source in request.noise:
        if not isinstance(source, Run) and is_noise(source):
            steps = _of_steps(read_noise(source), matched)
            worst, of_rows = np.maximum(worst, steps[0]), np.maximum(of_rows, steps[1])
            continue
        again = _match(matched.reference.run, open_source(source, opened), Renames(), request, None, device)
        errors = np.nan_to_num(_errors(again), nan=0.0, posinf=0.0)
        for row, error in zip(again.alignment.reference.tolist(), errors.tolist(), strict=True):
            if row in place:
                worst[place[row]] = max(worst[place[row]], Policy.of_runs(error))
    return worst, of_rows


def as_one(noise: Allowed | None, row_gain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
    """What noise allows of a pair's error, be it of the whole or of the worst row."""
    return None if noise is None else np.maximum(noise[0], noise[1] / row_gain)


def _of_steps(noise: Noise, matched: Matched) -> Allowed:
    side, rows = matched.reference, matched.alignment.reference
    spots = zip(side.module.at(rows), side.call[rows].tolist(), side.kind.at(rows), side.path.at(rows), strict=True)
    found = np.array([Policy.of_steps(*noise.of(spot)) for spot in spots]).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def conclude(
    matched: Matched,
    judgement: Judgement,
    born: Mapping[int, Finding],
    policy: Policy,
    renames: Renames,
    missing: Sequence[Finding] | None = None,
) -> Comparison:
    """The comparison, from what was judged and the births by their pair, the earliest first.

    Of an isolated run, `missing` is what the candidate lacks and should not; of others, None.
    """
    left, right, alignment, measures = matched.reference, matched.candidate, matched.alignment, matched.measures
    rows = alignment.reference
    births = [*born.values(), *(missing or ())]
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
        sentence=_sentence(verdict, born, matched, judgement, counts, missing),
        first=first,
        births=births,
        counts=dict(counts),
        unmatched=_unmatched(matched),
        table=table_of(left, right, alignment, measures, judgement, born),
        policy=policy.described(),
        notes=notes,
        info={"reference": left.run.info, "candidate": right.run.info},
        isolated=missing is not None,
    )


def _sentence(
    verdict: str,
    born: Mapping[int, Finding],
    matched: Matched,
    judgement: Judgement,
    counts: Mapping[str, int],
    missing: Sequence[Finding] | None,
) -> str:
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    if verdict == "incomparable":
        return sentence.too_little(len(left), len(right), len(alignment.reference))
    agree = "The runs match" if missing is None else "Every module agrees on the reference's own inputs"
    if missing and not born:
        return sentence.isolated(missing, None, len(left.ranks) > 1)
    if not born:
        if not counts.get("close"):
            return sentence.matched(counts, None, agree)
        worst = int(np.argmax(np.where(np.array(judgement.status) == "close", matched.measures.rel_l2, -1.0)))
        key = left.key(int(alignment.reference[worst]))
        return sentence.matched(counts, (float(matched.measures.rel_l2[worst]), str(key)), agree)
    pair, first = next(iter(born.items()))
    shapes = left.shape(int(alignment.reference[pair])), right.shape(int(alignment.candidate[pair]))
    counts_of = [matched.measures.sides[side] for side in ("reference", "candidate")]
    ours, theirs = (
        sentence.Tensor(shape, int(side["nan"][pair] + side["inf"][pair]))
        for shape, side in zip(shapes, counts_of, strict=True)
    )
    if left.run.is_checkpoint and right.run.is_checkpoint:
        return sentence.checkpoints(first, len(born), (ours, theirs))
    if missing is not None:
        return sentence.isolated([*born.values(), *missing], (ours, theirs), len(left.ranks) > 1)
    at_start = first.key.step == int(left.step.min())
    changed = sum(f.key[:1] == first.key[:1] and f.key.kind == "param" and f.key.call == 0 for f in born.values())
    return sentence.parted(first, changed if at_start else 0, (ours, theirs), len(left.ranks) > 1, _has_forward(left))


def _has_forward(side: Side) -> bool:
    return not {"input", "output"}.isdisjoint(side.kind.words)


def _notes(matched: Matched, renames: Renames, verdict: str, births: list[Finding]) -> list[str]:
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    notes = [
        f"{name}: {text}" for name, side in (("reference", left), ("candidate", right)) for text in side.run.notices
    ]
    one_sided = len(alignment.only_reference) + len(alignment.only_candidate)
    if one_sided > len(alignment.reference) // 4 and not renames and (rules := suggest(left, right)):
        options = " ".join(f"--rename '{rule}'" for rule in rules)
        notes.append(f"many names are on one side only; try {options}")
    if births and np.any(~matched.measures.exact & ~np.isnan(matched.measures.rel_l2)):
        notes.append('estimated from sketches; capture with keep="tensors" to measure every element')
    return notes


def _unmatched(matched: Matched) -> list[Unmatched]:
    found = []
    alignment = matched.alignment
    for name, side, rows in (
        ("reference", matched.reference, alignment.only_reference),
        ("candidate", matched.candidate, alignment.only_candidate),
    ):
        found += [
            Unmatched(name, side.key(row), int(side.rank[row]), side.cls[row])  # type: ignore[arg-type]
            for row in rows[:_MOST_UNMATCHED].tolist()
        ]
    return found


def open_source(source: Source, opened: ExitStack) -> Run:
    """A run that the caller has open stays open; one that is opened here is closed with the comparison."""
    return source if isinstance(source, Run) else opened.enter_context(open_any(source, summarize))


def _scope(request: Request, renames: Renames | None, state_only: bool) -> Scope:
    """Of the candidate if there are `renames`, even empty ones; else of the reference, whose names patterns mean."""

    def chosen(value: Collection[int] | Mapping[int, int] | None) -> Collection[int] | None:
        if isinstance(value, Mapping):
            return list(value) if renames is None else list(value.values())
        return value

    return Scope(request.modules, request.kinds, chosen(request.steps), chosen(request.ranks), state_only, renames)


def _mapping(value: Any) -> Mapping[int, int] | None:
    return value if isinstance(value, Mapping) else None


def _read_map(path: str | os.PathLike[str] | None) -> dict[str, str] | None:
    if path is None:
        return None
    try:
        lines = Path(path).read_text().splitlines()
    except FileNotFoundError as error:
        raise RunNotFound(f"there is no map file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RunUnreadable(f"the map file {path} cannot be read: {error}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, equals, other = line.partition("=")
            if not equals:
                raise UsageError(
                    f"{path}, line {number}: write 'candidate name = reference name', not {line.strip()!r}"
                )
            found[name.strip()] = other.strip()
    return found

"""The tolerance from measured noise: from further runs of the reference, or from files of `tensortap.noise`."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import one_module_each
from tensortap.compare.align.side import Ints, Side
from tensortap.compare.judge.rules.margins import MOST_ASSUMED
from tensortap.compare.judge.rules.rounding import NoiseAllowance, Policy
from tensortap.compare.matched import Matched
from tensortap.compare.matching import match
from tensortap.compare.measure.engine import Engine
from tensortap.compare.options import ComparisonOptions
from tensortap.compare.pair_numbers import errors_of
from tensortap.compare.sources import Source, open_source
from tensortap.errors import UsageError
from tensortap.store import Run
from tensortap.store.formats.npy.tree import with_common_names
from tensortap.store.noise_file import Noise, is_noise, read_noise

__all__ = ["as_one", "check_noise", "noise_of"]

_LEAST_SHARE = 0.1


def check_noise(source: Source, noise: Noise, modules: Collection[str]) -> None:
    """Raise UsageError if a noise file is of another model: it allows nothing for modules that it does not know."""
    found, least = len(noise.modules & set(modules)), min(len(noise.modules), len(modules))
    if found < _LEAST_SHARE * least:
        raise UsageError(
            f"{source} was measured on another model: {found} of the {len(noise.modules)} modules that it knows are "
            "the reference's; measure the noise of the reference model with tensortap.noise"
        )


def noise_of(
    matched: Matched, options: ComparisonOptions, opened: ExitStack, engine: Engine | None = None
) -> NoiseAllowance | None:
    """Return what measured noise allows for every pair: the most among further runs and noise files."""
    if not options.noise:
        return None
    worst = np.zeros(len(matched.alignment.reference))
    of_rows = worst.copy()
    place = {row: pair for pair, row in enumerate(_rows_of_index(matched))}
    for source in options.noise:
        if not isinstance(source, Run) and is_noise(source):
            noise = read_noise(source)
            check_noise(source, noise, set(matched.reference.module.words))
            steps = _of_steps(noise, matched)
            worst, of_rows = np.maximum(worst, steps[0]), np.maximum(of_rows, steps[1])
            continue
        _, noisy = with_common_names(matched.reference.run, open_source(source, opened))
        renames = one_module_each(matched.reference.run, noisy)
        again = match(matched.reference.run, noisy, renames, options, None, engine)
        errors = np.nan_to_num(errors_of(again), nan=0.0, posinf=0.0)
        for row, error in zip(_rows_of_index(again), errors.tolist(), strict=True):
            if row in place:
                worst[place[row]] = max(worst[place[row]], Policy.of_runs(error))
    return worst, of_rows


def _rows_of_index(matched: Matched) -> list[tuple[int, int]]:
    """Return rank and row of each pair in the reference's run: which records take part depends on the other side."""
    side, rows = matched.reference, matched.alignment.reference
    return list(zip(side.rank[rows].tolist(), side.row[rows].tolist(), strict=True))


def as_one(noise: NoiseAllowance | None, row_gain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
    """Return what noise allows of a pair's error, whether of the whole or of the worst row."""
    return None if noise is None else np.maximum(noise[0], noise[1] / row_gain)


def _of_steps(noise: Noise, matched: Matched) -> NoiseAllowance:
    side, rows = matched.reference, matched.alignment.reference
    spots = zip(side.module.at(rows), side.call[rows].tolist(), side.kind.at(rows), side.path.at(rows), strict=True)
    found = np.array([Policy.of_steps(*noise.of(spot)) for spot in spots]).reshape(-1, 2)
    more = _cancelled_since(side, rows)[:, None]
    found = np.minimum(more * found, np.maximum(found, MOST_ASSUMED))
    return found[:, 0], found[:, 1]


def _cancelled_since(side: Side, rows: Ints) -> npt.NDArray[np.float64]:
    """Return by row how many times more a parameter's gradient cancels out than in the first step; 1 at least.

    Noise files know one step. The gradient sums products with the gradients at the module's outputs: its noise is that
    of the terms, and counts more where less is left of their sum.
    """
    places = [np.asarray(column) for column in (side.rank, side.step, side.pass_number, side.module.codes)]
    given: dict[tuple[int, ...], float] = {}
    for row in np.flatnonzero(side.kind.among(("grad_output",))).tolist():
        place = tuple(int(column[row]) for column in places)
        given[place] = given.get(place, 0.0) + float(side.l2[row]) ** 2
    more, first = np.ones(len(rows)), dict[tuple[object, ...], float]()
    for number in np.flatnonzero(side.kind.among(("param_grad",))[rows]).tolist():
        row = int(rows[number])
        terms, left = given.get(tuple(int(column[row]) for column in places), 0.0) ** 0.5, float(side.l2[row])
        if 0 < left < float("inf") and 0 < terms < float("inf"):
            spot = side.rank[row], side.module[row], side.path[row]
            more[number] = max(1.0, terms / left / first.setdefault(spot, terms / left))
    return more

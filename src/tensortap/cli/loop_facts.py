"""Plain data about the loop of an open run, for `tensortap show --loop`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np

from tensortap.core.arguments import as_json
from tensortap.report.terminal.loop import LoopPage, LoopStep
from tensortap.store import Run
from tensortap.store.loop import LoopFacts

__all__ = ["loop_objects", "loop_page"]

_MOST_CHANGES = 40
_OF_MODULES = ("attributes", "visible")


def loop_page(run: Run, rank: int | None, steps: Sequence[int], limit: int) -> LoopPage:
    """Return the page about the first `limit` of these steps; 0 is all of them."""
    facts = run.loop(rank)
    shown = list(steps[:limit] if limit else steps)
    used, made = _norms(run, rank)
    rows = [LoopStep(step, _values(facts, step), used.get(step), made.get(step)) for step in shown]
    changes = [change for change in _changes(facts) if change[0] in set(shown)]
    return LoopPage(str(run.path), rows, len(steps) - len(shown), changes[:_MOST_CHANGES])


def loop_objects(run: Run, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return each change of a fact for JSON, as in a run's loop.jsonl, with its rank."""
    return [
        {"rank": rank, **fact._asdict(), "value": {name: as_json(value) for name, value in fact.value.items()}}
        for rank in ranks
        for fact in run.loop(rank)
    ]


def _values(facts: LoopFacts, step: int) -> dict[tuple[str, str], Any]:
    subjects = ((fact, of) for fact in facts.names() if fact not in _OF_MODULES for of in facts.subjects(fact))
    return {(fact, of): value for fact, of in subjects if (value := facts.value(fact, step, of)) is not None}


def _changes(facts: LoopFacts) -> list[tuple[int, str, str, Any, Any]]:
    """Return the attributes that changed: step, module, name, value before and after."""
    found = []
    for module in facts.subjects("attributes"):
        known = facts.changes("attributes", module)
        for before, after in pairwise(known):
            names = dict.fromkeys([*before.value, *after.value])
            for name in names:
                pair = before.value.get(name), after.value.get(name)
                if repr(pair[0]) != repr(pair[1]):
                    found.append((after.step, module, name, *pair))
    return sorted(found, key=lambda change: change[0])


def _norms(run: Run, rank: int | None) -> tuple[dict[int, float], dict[int, float]]:
    """Return the norm of all gradients that the optimizer used, and of those from backward, by step.

    A parameter without a step_grad was stepped with its only param_grad. A step with several of these has no norm from
    backward: the optimizer gets their sum.
    """
    ranks = [run.ranks[0] if rank is None else rank] if run.ranks else []
    made: dict[int, dict[tuple[str, str], float]] = {}
    used: dict[int, dict[tuple[str, str], float]] = {}
    summed: set[int] = set()
    for step, kind, parameter, norm in _gradients(run, ranks):
        if kind == "step_grad":
            used.setdefault(step, {})[parameter] = norm
        elif parameter in made.setdefault(step, {}):
            summed.add(step)
        else:
            made[step][parameter] = norm
    steps = made.keys() | used.keys()
    merged = {step: _total({**made.get(step, {}), **used.get(step, {})}.values()) for step in steps}
    return merged, {step: _total(made[step].values()) for step in made if step not in summed}


def _gradients(run: Run, ranks: Sequence[int]) -> Iterator[tuple[int, str, tuple[str, str], float]]:
    for rank in ranks:
        rows = run.columns(rank)
        kinds = np.asarray(rows.column("kind").to_numpy())
        chosen = rows.take(np.flatnonzero(np.isin(kinds, ("param_grad", "step_grad"))))
        columns = (chosen.column(name).to_pylist() for name in ("step", "kind", "module", "path", "l2"))
        for step, kind, module, path, norm in zip(*columns, strict=True):
            yield step, kind, (module, path.partition("~")[0]), norm


def _total(norms: Any) -> float:
    return sqrt(sum(norm * norm for norm in norms))

"""Pairs that could not be judged count as seen if they are few and match in another step or micro step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tensortap.compare.judge.judged_elsewhere import all_judged_elsewhere
from tensortap.compare.judge.judgement import Judgement

MODULES, STEPS = 16, 2


def column(values: Any) -> Any:
    return SimpleNamespace(codes=values)


def covered(unjudged: dict[int, str]) -> bool:
    """Two steps of 16 modules with one output each. `unjudged` has the status of each row that is not close."""
    rows = np.arange(MODULES * STEPS)
    zeros = np.zeros(len(rows), int)
    side: Any = SimpleNamespace(
        rank=zeros,
        step=rows // MODULES,
        module=column(rows % MODULES),
        kind=column(zeros),
        path=column(zeros),
        phase=column(zeros),
        call=zeros,
    )
    status = [unjudged.get(row, "close") for row in rows.tolist()]
    judgement = Judgement(status, np.zeros(len(rows)), np.zeros(len(rows)), ["rule"] * len(rows), [], {}, set())
    open_rows = [row for row, each in unjudged.items() if each == "unjudged"]
    alignment: Any = SimpleNamespace(reference=rows)
    return all_judged_elsewhere(open_rows, judgement, side, alignment)


def test_few_pairs_that_match_in_another_step_are_covered() -> None:
    assert covered({})
    assert covered({MODULES + 3: "unjudged", MODULES + 4: "unjudged"})


def test_pairs_that_match_nowhere_are_not_covered() -> None:
    assert not covered({3: "unjudged", MODULES + 3: "unjudged"})
    assert not covered({3: "diverged", MODULES + 3: "unjudged"})


def test_many_pairs_of_a_step_are_not_covered() -> None:
    assert not covered({MODULES + row: "unjudged" for row in range(3)})

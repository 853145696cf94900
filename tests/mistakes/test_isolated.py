"""Each module on the reference's own inputs, in bfloat16: mistakes are named, also two at once; right models pass.

Figures of all of them, and of free-running comparisons: `python benchmarks/isolation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .isolated import CLEAN_IN_SHORT, IN_SHORT, Named, References, is_glue, pairs_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

NAMED_AT_LEAST, BOTH_NAMED_AT_LEAST = 0.95, 0.90


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    folder: Path = tmp_path_factory.mktemp("references")
    yield References(folder)


@pytest.fixture(scope="module")
def alone(references: References) -> list[Named]:
    return [references.named(mistake) for mistake in IN_SHORT]


def describe_failures(outcomes: list[Named], right: list[bool]) -> str:
    return "\n".join(str(outcome) for outcome, ok in zip(outcomes, right, strict=True) if not ok)


def test_mistakes_are_named_exactly(alone: list[Named]) -> None:
    right = [outcome.exact for outcome in alone]
    assert sum(right) / len(right) >= NAMED_AT_LEAST, describe_failures(alone, right)


def test_right_models_do_not_alarm(references: References) -> None:
    assert len(CLEAN_IN_SHORT) >= 25
    alarms = {pair.name: result.sentence for pair in CLEAN_IN_SHORT if (result := references.clean(pair)).births}
    assert not alarms


def test_two_mistakes_are_both_named(references: References, alone: list[Named]) -> None:
    """A free-running comparison names the first of them, and hardly ever the second."""
    pairs = list(pairs_of(30, alone))
    outcomes = [references.named(*pair) for pair in pairs]
    right = [outcome.all_named for outcome in outcomes]
    assert sum(right) / len(right) >= BOTH_NAMED_AT_LEAST, describe_failures(outcomes, right)
    free = [references.named(*pair, isolate=False).all_named for pair in pairs[:10]]
    assert sum(free) < sum(right[:10])


def test_two_mistakes_one_between_modules_are_both_named(references: References, alone: list[Named]) -> None:
    outcomes = [references.named(*pair) for pair in pairs_of(15, alone, is_glue)]
    right = [outcome.all_named for outcome in outcomes]
    assert sum(right) / len(right) >= BOTH_NAMED_AT_LEAST, describe_failures(outcomes, right)

"""Each mistake is found where it was made; right runs raise no alarm.

A candidate is trained once, with its tensors, and compared with the reference's tensors and with its summaries.
Candidates that are summaries, too, are those among rounding noise.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tensortap as tt
from tensortap.core.records import display_name

from .clean import CLEAN
from .models import MODELS
from .running import Runs, run_mistake, training_of
from .same import sums_in_two
from .zoo import MISTAKES, Mistake

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

NAMED_AT_LEAST = {"tensors": 0.95, "summary": 0.90}
NAMED_AMONG_NOISE = 0.90


@dataclass(frozen=True)
class Outcome:
    name: str
    kind: str
    expected: str
    result: Any
    right: bool

    def __str__(self) -> str:
        first = self.result.first
        got = "nothing" if first is None else display_name(first.module)
        size = "" if first is None else f"{first.rel_l2:.1e} {first.status}"
        return f"{self.name:36} expected {self.expected:28} got {got:28} {size:18} {self.result.sentence}"


def _nothing(record: logging.LogRecord) -> bool:
    return False


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("runs")
    trace = logging.getLogger("torch.__trace")  # the compiler's thousands of lines in the report of a failure
    trace.addFilter(_nothing)
    yield Runs(folder)
    trace.removeFilter(_nothing)
    torch._dynamo.reset()
    shutil.rmtree(folder)


@pytest.fixture(params=sorted(NAMED_AT_LEAST))
def keep(request: pytest.FixtureRequest) -> str:
    """What the reference keeps."""
    return str(request.param)


def delete(*runs: Path) -> None:
    """Delete the runs of a pair: those of all pairs together would fill a gigabyte."""
    for run in runs:
        shutil.rmtree(run)


def outcome_of(mistake: Mistake, result: Any) -> Outcome:
    right = result.verdict == "diverged" and result.first is not None and result.first.module in mistake.places
    return Outcome(mistake.name, mistake.kind, " or ".join(map(display_name, mistake.places[:3])), result, right)


@pytest.fixture(scope="module")
def all_mistaken(runs: Runs) -> dict[str, list[Outcome]]:
    outcomes: dict[str, list[Outcome]] = {keep: [] for keep in NAMED_AT_LEAST}
    for mistake in MISTAKES:
        candidate = run_mistake(mistake, runs, "tensors")
        for keep, found in outcomes.items():
            result = tt.compare(runs.reference(mistake.model, keep, mistake.kinds), candidate)
            found.append(outcome_of(mistake, result))
        delete(candidate)
    return outcomes


@pytest.fixture
def mistaken(all_mistaken: dict[str, list[Outcome]], keep: str) -> list[Outcome]:
    return all_mistaken[keep]


@pytest.fixture(scope="module")
def all_clean(runs: Runs) -> dict[str, list[Outcome]]:
    outcomes: dict[str, list[Outcome]] = {keep: [] for keep in NAMED_AT_LEAST}
    for pair in CLEAN:
        candidate, noise = pair.candidate_and_noise(runs, "tensors")
        for keep, found in outcomes.items():
            result = tt.compare(pair.reference(runs, keep), candidate, noise=noise)
            right = result.first is None and result.verdict != "diverged"
            found.append(Outcome(pair.name, "clean", "nothing", result, right))
        delete(candidate, *noise)
    return outcomes


@pytest.fixture
def clean(all_clean: dict[str, list[Outcome]], keep: str) -> list[Outcome]:
    return all_clean[keep]


def describe_failures(outcomes: list[Outcome]) -> str:
    wrong = [outcome for outcome in outcomes if not outcome.right]
    return "\n".join([f"{len(wrong)} of {len(outcomes)} are not as expected:", *map(str, wrong)])


def test_mistakes_are_named_exactly(mistaken: list[Outcome], keep: str) -> None:
    """`pytest -rP` shows the figures."""
    right = sum(outcome.right for outcome in mistaken)
    print(f"from {keep}: {right} of {len(mistaken)} mistakes are named exactly")
    assert right / len(mistaken) >= NAMED_AT_LEAST[keep], describe_failures(mistaken)


def test_mistakes_are_named_among_rounding_noise(runs: Runs) -> None:
    """Every sum of the candidate is rounded differently. Mistakes of the optimizer are not among these: Adam makes a
    whole step of the smallest gradient, so the noise of gradients near zero hides a small mistake in the update."""
    noise = sums_in_two(1 / 2)
    found = []
    for mistake in MISTAKES:
        if mistake.kind != "update":
            candidate = run_mistake(mistake, runs, "summary", noise)
            result = tt.compare(runs.reference(mistake.model, "summary", mistake.kinds), candidate)
            found.append(outcome_of(mistake, result))
            delete(candidate)
    assert sum(outcome.right for outcome in found) / len(found) >= NAMED_AMONG_NOISE, describe_failures(found)


def test_mistakes_outside_the_optimizer_are_all_noticed(mistaken: list[Outcome]) -> None:
    missed = [outcome for outcome in mistaken if outcome.kind != "update" and outcome.result.verdict != "diverged"]
    assert not missed, "\n".join(map(str, missed))


def test_the_first_finding_is_a_birth(mistaken: list[Outcome]) -> None:
    for outcome in mistaken:
        if outcome.right:
            assert outcome.result.first.module in {birth.module for birth in outcome.result.births}, str(outcome)


def test_right_runs_do_not_alarm(clean: list[Outcome], keep: str) -> None:
    """`pytest -rP` shows the figures."""
    print(f"from {keep}: {sum(not outcome.right for outcome in clean)} alarms in {len(clean)} right pairs")
    assert all(outcome.right for outcome in clean), describe_failures(clean)


def test_only_tensors_of_both_sides_give_exact_numbers(mistaken: list[Outcome], keep: str) -> None:
    differences = [birth.difference for outcome in mistaken for birth in outcome.result.births if birth.difference]
    assert len(differences) >= len(mistaken) / 2
    assert {each.exact for each in differences if not each.equal} == {keep == "tensors"}


# --- the zoo itself ---------------------------------------------------------------------------------------------------


def test_names_are_unique_and_places_exist() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 30
    assert len({pair.name for pair in CLEAN}) == len(CLEAN) >= 27
    modules = {model: {name for name, _ in training_of(model).model.named_modules()} for model in MODELS}
    for mistake in MISTAKES:
        assert set(mistake.places) <= modules[mistake.model], mistake.name


def test_both_sides_start_alike_unless_the_mistake_is_in_the_state() -> None:
    for mistake in MISTAKES:
        reference, candidate = training_of(mistake.model), training_of(mistake.model)
        random = torch.get_rng_state()
        mistake.apply(candidate)
        assert torch.equal(random, torch.get_rng_state()), mistake.name
        state, buffers = candidate.model.state_dict(), dict(candidate.model.named_buffers())
        same = all(torch.equal(state[name], value) for name, value in reference.model.state_dict().items())
        same = same and all(torch.equal(buffers[name], value) for name, value in reference.model.named_buffers())
        assert same == (mistake.kind != "state"), mistake.name

"""Right pairs of hand-written models raise no alarm, and mistakes in them are named.

Some of the models, in some ways. All of it: `python benchmarks/handwritten.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from .measuring import Bench
from .models import MISTAKES, MODELS
from .right import pairs_of
from .running import training_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("handwritten")
    yield Bench(folder)
    shutil.rmtree(folder)


ALARMED = [
    ("gan", "sums, fitted", "tensors", "right"),  # gradients of matrices cancel out
    ("gan", "sums, small inputs", "tensors", "right"),  # so does what a spectral norm leaves
    ("gnn", "float16 that overflows", "tensors", "cannot tell"),  # numbers beyond the range of float16
    ("clip", "float16 that overflows", "summary", "cannot tell"),
    ("clip", "float16 that overflows", "isolated", "cannot tell"),
    (
        "rotary",
        "attention by hand, padded left",
        "tensors",
        "right",
    ),  # positions that see nothing, by a mask made inside
    ("rotary", "attention by hand, padded left", "summary", "right"),
    ("rotary", "attention by hand, padded left", "isolated", "right"),
    ("rotary", "attention by hand, padded left, reads padding", "isolated", "cannot tell"),
    ("moe", "every expert on every token", "summary", "right"),  # experts that are given other tokens
    ("unet", "pool by view", "summary", "right"),  # ties of zeros
    ("unet", "pool by view", "isolated", "right"),
    ("seq2seq", "autocast and first rewrite", "summary", "right"),  # a cell by hand computes in bfloat16
    ("gan", "sums, zero inputs", "isolated", "right"),  # a norm of numbers that are all the same
    ("mobilenet", "sums under autocast", "summary", "right"),  # products of convolutions in bfloat16
    ("ctc", "bf16, sums", "summary", "right"),  # a norm of gradients in bfloat16
    ("codes", "autocast and first rewrite", "isolated", "cannot tell"),  # codes that are as near
    ("forces", "threads", "isolated", "right"),  # a backward that is differentiated
    ("views", "first rewrite, 10 steps", "tensors", "right"),  # what the code around modules reads
]


@pytest.mark.parametrize(("model", "name", "way", "expected"), ALARMED)
def test_a_right_pair_raises_no_alarm(bench: Bench, model: str, name: str, way: str, expected: str) -> None:
    (pair,) = [pair for pair in pairs_of(model) if pair.name == name]
    outcome = bench.right(pair, way)
    assert outcome.outcome == expected, str(outcome)


NAMED = [
    ("clip", "scale not trained", "summary"),
    ("clip", "norm over rows", "isolated"),
    ("gan", "slope", "tensors"),
    ("rotary", "key not rotated", "summary"),
    ("rotary", "mask off by one", "isolated"),
    ("rotary", "value detached", "summary"),
    ("moe", "best alone", "summary"),
    ("moe", "last expert skipped", "tensors"),
    ("unet", "skip detached", "summary"),
    ("unet", "momentum of running means", "isolated"),
    ("seq2seq", "cell state lost", "summary"),
    ("actor", "not clipped", "summary"),
    ("codes", "other distance", "summary"),
    ("forces", "other way", "isolated"),
]


@pytest.mark.parametrize(("model", "name", "way"), NAMED)
def test_a_mistake_is_named_beside_other_right_code(bench: Bench, model: str, name: str, way: str) -> None:
    (mistake,) = [each for each in MISTAKES if (each.family, each.name) == (model, name)]
    outcome = bench.mistake(mistake, "beside", way)
    assert outcome.outcome == "exact", str(outcome)


def test_the_models_are_many_and_a_part_of_them_is_held_out() -> None:
    assert len(MODELS) >= 30 and sum(model.held_out for model in MODELS.values()) >= 13
    assert len({(mistake.family, mistake.name) for mistake in MISTAKES}) == len(MISTAKES) >= 100


def test_places_exist_and_a_mistake_draws_no_random_numbers() -> None:
    for mistake in MISTAKES:
        training = training_of(mistake.family)
        names = {name for name, _ in training.model.named_modules(remove_duplicate=False)}
        assert set(mistake.places) <= names, mistake.name
        random = torch.get_rng_state()
        mistake.apply(training)
        assert torch.equal(random, torch.get_rng_state()), mistake.name

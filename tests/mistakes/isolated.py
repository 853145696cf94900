"""The mistakes in bfloat16, each module on the reference's own inputs, with measured noise; one at a time and two."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tensortap as tt
from tensortap.core.records import MODULE_KINDS

from .clean import EQUIVALENT, IN_BF16, SUMS, Clean
from .patches import Apply, both
from .running import SEED, Training, backward, train_under, training_of
from .same import sums_in_two
from .zoo import MISTAKES, Mistake

# They round to bfloat16, as everything does here.
_NO_MISTAKES = ("softmax-in-bf16", "one-layer-in-bf16", "router-in-bf16", "weight-gradient-in-bf16")
IN_SHORT = [mistake for mistake in MISTAKES if mistake.name not in _NO_MISTAKES]
_KINDS = tuple(kind for kind in MODULE_KINDS if kind != "step_grad")  # the tap is not given the optimizer
OTHER_ROUNDING = sums_in_two(1 / 2)
# In short dtypes a softmax makes ties of nearly equal numbers: experts chosen before and after it really differ.
CLEAN_IN_SHORT = [pair for pair in (*SUMS, *EQUIVALENT) if pair.name != "experts-softmax-last"]


@dataclass(frozen=True)
class Named:
    """The mistakes that were made, and the modules that were named for them, in order."""

    mistakes: tuple[Mistake, ...]
    modules: tuple[str, ...]
    sentence: str

    @property
    def all_named(self) -> bool:
        return all(set(mistake.places) & set(self.modules) for mistake in self.mistakes)

    @property
    def exact(self) -> bool:
        """All of them, and nothing else."""
        meant = {place for mistake in self.mistakes for place in mistake.places}
        return self.all_named and set(self.modules) <= meant

    def __str__(self) -> str:
        names = " and ".join(mistake.name for mistake in self.mistakes)
        return f"{names:60} expected {[m.places[:2] for m in self.mistakes]} got {list(self.modules)}: {self.sentence}"


class References:
    """For each model a run and a noise file, made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: set[str] = set()

    def of(self, model: str) -> tuple[Path, Path]:
        run, noise = self._folder / model, self._folder / f"{model}.noise"
        if model not in self._made:
            train_under(_in_bf16(model), lambda m: tt.capture(m, run, keep="tensors", kinds=_KINDS))
            training = _in_bf16(model)
            tt.noise(training.model, lambda m: backward(training, m, training.batches[0][0]), noise)
            self._made.add(model)
        return run, noise

    def checked(self, model: str, apply: Apply, *, isolate: bool = True, steps: int = 1) -> Any:
        """Return the comparison of a training that was changed."""
        training = _in_bf16(model)
        apply(training)
        run, noise = self.of(model)
        return train_under(training, lambda m: tt.check(m, run, noise=noise, isolate=isolate), steps).result

    def named(self, *mistakes: Mistake, isolate: bool = True) -> Named:
        """Return what is found in a model that makes mistakes and also rounds differently."""
        # Mistakes of the optimizer show in its second step at the latest, all others in the first.
        steps = 2 if any(mistake.kind == "update" for mistake in mistakes) else 1
        apply = both(OTHER_ROUNDING, *(mistake.apply for mistake in mistakes))
        result = self.checked(mistakes[0].model, apply, isolate=isolate, steps=steps)
        modules = dict.fromkeys(birth.module for birth in result.births)
        return Named(mistakes, tuple(modules), result.sentence)

    def clean(self, pair: Clean) -> Any:
        return self.checked(pair.model, pair.candidate)


def _in_bf16(model: str) -> Training:
    training = training_of(model)
    IN_BF16(training)
    return training


def is_glue(mistake: Mistake) -> bool:
    """Whether it is in the code of a container, between its modules."""
    model = training_of(mistake.model).model
    containers = {name for name, module in model.named_modules() if any(True for _ in module.children())}
    return mistake.kind in ("forward", "backward") and set(mistake.places) <= containers


def pairs_of(
    count: int, alone: Sequence[Named], among: Callable[[Mistake], bool] = lambda mistake: True
) -> Iterator[tuple[Mistake, Mistake]]:
    """Two mistakes of one model at different places, drawn at random, at least one of them `among` the wanted.

    Mistakes that bfloat16 rounding hides even alone are left out, and so is the optimizer.
    """
    drawn = random.Random(SEED)
    pool = [named.mistakes[0] for named in alone if named.all_named and named.mistakes[0].kind != "update"]
    wanted = [mistake for mistake in pool if among(mistake)]
    seen: set[frozenset[str]] = set()
    while len(seen) < count:
        one = drawn.choice(wanted)
        other = drawn.choice([mistake for mistake in pool if mistake.model == one.model])
        names = frozenset((one.name, other.name))
        if not set(one.places) & set(other.places) and names not in seen and _fit(one, other):
            seen.add(names)
            yield one, other


def _fit(*mistakes: Mistake) -> bool:
    """Whether a model with both mistakes still runs: some exclude each other."""
    training = _in_bf16(mistakes[0].model)
    try:
        with torch.random.fork_rng(devices=[]):
            both(*(mistake.apply for mistake in mistakes))(training)
            backward(training, training.model, training.batches[0][0])
    except (RuntimeError, IndexError, TypeError):
        return False
    return True

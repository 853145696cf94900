"""Trains a hand-written model for a few steps, right or wrong. The loop is that of tests/field."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tensortap as tt
from field.kit.mistake import nothing
from field.kit.patches import Apply
from field.kit.running import STEPS, Training, loss_of, train_under
from tensortap.core.records import MODULE_KINDS

from .models import MODELS

__all__ = ["FITTED", "STEPS", "captured", "checked", "fitted", "training_of"]

FITTED = 200
"""Steps of a model that is trained before it is tapped."""
KINDS = MODULE_KINDS


def training_of(name: str, steps: int = STEPS, seed: int = 0, *changes: Apply) -> Training:
    """Return a new model and its data, always the same for a seed."""
    made = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = made.build()
    random = torch.Generator().manual_seed(seed + 1)
    training = Training(model.train(), [[made.batch(random)] for _ in range(steps)], made.loss)
    for change in changes:
        change(training)
    return training


_fitted: dict[tuple[Any, ...], dict[str, Any]] = {}


def fitted(name: str) -> Apply:
    """Train the model on its data until losses are small and gradients cancel out."""

    def apply(training: Training) -> None:
        first = next(iter(training.batches[0][0].values())).double().sum()
        spot = (name, float(first), len(training.batches))
        if spot not in _fitted:
            copied = copy.copy(training)
            copied.batches = training.batches * (FITTED // len(training.batches))
            copied.groups = lambda name, parameter: {"lr": 5e-3, "weight_decay": 0.0}
            train_under(copied, lambda model, optimizer: _Untapped())
            _fitted[spot] = copy.deepcopy(training.model.state_dict())
        training.model.load_state_dict(_fitted[spot])

    return apply


class _Untapped:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def captured(training: Training, path: Path, keep: str, kinds: tuple[str, ...] = KINDS) -> Path:
    """Train under a tap."""

    def tap(model: Any, optimizer: Any) -> Any:
        return tt.capture(model, path, keep=keep, kinds=kinds, optimizer=optimizer)

    train_under(training, tap)
    return path


def checked(training: Training, reference: Path, noise: Path | None = None) -> Any:
    """Train under a check, and return its result."""
    return train_under(
        training, lambda model, optimizer: tt.check(model, reference, noise=noise, optimizer=optimizer)
    ).result


def perturbed(training: Training, path: Path) -> Path:
    """Measure the noise of a reference."""
    batch = training.batches[0][0]
    tt.noise(training.model, lambda model: (loss_of(training, model, batch) * training.share).backward(), path)
    return path


Change = Callable[[Training], None]
UNCHANGED = nothing

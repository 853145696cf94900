"""What a hand-written model is: how it is built, fed and trained, other right ways to compute it, and its mistakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from field.kit.data import Batch
from field.kit.mistake import Mistake
from field.kit.patches import Apply, edits, has

Rewrites = Mapping[str, Apply]


@dataclass(frozen=True)
class Handwritten:
    """A model, its data and its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    rewrites: Rewrites = field(default_factory=dict)
    """The same computation in other code."""
    commons: Rewrites = field(default_factory=dict)
    """Other data or losses of both sides, each beside all `rewrites`."""
    mistakes: tuple[tuple[Any, ...], ...] = ()
    """Each as (name, module to name, change), and its kind if that is not "forward"."""
    held_out: bool = False
    """Whether no rule of the comparison is tuned on it."""
    draws: bool = False
    """Whether it draws random numbers: other dtypes draw others."""
    splits: bool = False
    """Whether its loss is a mean over rows, so that a batch may be split into micro batches."""
    checkpoints: tuple[str, ...] = ()
    """Modules that may be computed again in backward."""
    compiles: bool = True
    """Whether it runs compiled: a backward that is differentiated again does not."""
    short: bool = True
    """Whether it runs under autocast."""


@dataclass(frozen=True)
class Planted(Mistake):
    """A mistake in a hand-written model."""

    is_held_out: bool = False

    @property
    def places(self) -> tuple[str, ...]:
        if not callable(self.where):
            return (self.where,) if isinstance(self.where, str) else self.where
        from .running import training_of

        model = training_of(self.family).model
        found = {id(parameter) for name, parameter in model.named_parameters() if self.where(name, parameter)}
        modules = model.named_modules(remove_duplicate=False)
        return tuple(name for name, module in modules if found & {id(p) for p in module._parameters.values()})

    @property
    def held_out(self) -> bool:
        return self.is_held_out


def planted(family: str, model: Handwritten) -> list[Planted]:
    """The mistakes of one model."""
    found = []
    for row in model.mistakes:
        name, where, change, kind = (*row, "forward")[:4]
        if isinstance(change, tuple):
            change = edits(where if isinstance(where, str) else where[0], *change)
        elif isinstance(change, dict):
            change = has(where, **change)
        found.append(Planted(name, family, where, kind, change, is_held_out=model.held_out))
    return found


def in_every(kind: str, old: str, new: str, method: str = "forward", **names: Any) -> Apply:
    """Replace a part of the source of a method in every module of a class."""

    def apply(training: Any) -> None:
        found = [name for name, module in training.model.named_modules() if type(module).__name__ == kind]
        assert found, kind
        for name in found:
            edits(name, old, new, method, **names)(training)

    return apply

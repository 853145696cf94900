"""What a mistake is, and which modules a comparison must name for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from field.sets import EVERY

from .patches import Apply, edits, has
from .running import Training, training_of

Kind = Literal["forward", "backward", "state", "update", "precision"]


def nothing(training: Training) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Mistake:
    """One change of a right training.

    The module to name is the one to fix: a fault in what a container computes between its children, as a mask, is the
    container's; a wrong parameter or buffer is its owner's; a wrong loss of transformers' models, or a fault in the
    outermost forward, is the root's.
    """

    name: str
    family: str
    where: str | tuple[str, ...] | Callable[[str, nn.Parameter], bool]
    """The module that must be named, or all that are equally wrong at once: names, or the parameters concerned."""
    kind: Kind
    """Where it shows first: in activations, gradients, the model's state, the state after a step; or in the last bits
    of activations, so that a short dtype hides it."""
    apply: Apply
    common: Apply = nothing
    """A change of both sides."""

    @property
    def places(self) -> tuple[str, ...]:
        if callable(self.where):
            return _owners(self.family, self.where)
        return (self.where,) if isinstance(self.where, str) else self.where

    @property
    def held_out(self) -> bool:
        return EVERY[self.family].held_out

    @property
    def in_short(self) -> bool:
        """Whether it is a mistake in bfloat16, too."""
        return self.kind != "precision" and EVERY[self.family].short


def _owners(family: str, concerned: Callable[[str, nn.Parameter], bool]) -> tuple[str, ...]:
    """The modules that own one of the parameters, under every name."""
    model = training_of(family).model
    found = {id(parameter) for name, parameter in model.named_parameters() if concerned(name, parameter)}
    modules = model.named_modules(remove_duplicate=False)
    return tuple(name for name, module in modules if found & {id(p) for p in module._parameters.values()})


def every(name: str, parameter: nn.Parameter) -> bool:
    """All parameters are concerned."""
    return True


def vectors(name: str, parameter: nn.Parameter) -> bool:
    """Biases and norms are concerned."""
    return parameter.ndim <= 1


Change = tuple[str, str] | dict[str, Any] | Apply
"""Old and new code of the module's forward; other attributes of the module; or any change of the training."""


def table(family: str, *rows: tuple[Any, ...]) -> list[Mistake]:
    """Mistakes of one family, each as (name, place, `Change`), its kind if that is not "forward", and `common`."""
    made = []
    for row in rows:
        name, where, change, kind, common = *row, *_USUAL[len(row) - 3 :]
        made.append(Mistake(name, family, where, kind, _applied(where, change), common))
    return made


_USUAL: tuple[Any, ...] = ("forward", nothing)


def _applied(where: Any, change: Change) -> Apply:
    if isinstance(change, tuple):
        return edits(where, *change)
    return has(where, **change) if isinstance(change, dict) else change

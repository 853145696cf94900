"""Changes of a training. A module keeps its name and class, and no random number is drawn."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .running import Batch, Training, usual_groups

Apply = Callable[[Training], None]


def does(module: str, function: Callable[..., Any], method: str = "forward") -> Apply:
    """Replace the module's method by `function(module, ...)`."""

    def apply(training: Training) -> None:
        target = training.model.get_submodule(module)
        setattr(target, method, MethodType(function, target))

    return apply


def has(module: str, **attributes: Any) -> Apply:
    """Change plain attributes of the module."""

    def apply(training: Training) -> None:
        for name, value in attributes.items():
            setattr(training.model.get_submodule(module), name, value)

    return apply


def holds(module: str, tensor: str, change: Callable[[Tensor], Tensor]) -> Apply:
    """Change the values of a parameter or buffer, as a bad checkpoint does."""

    def apply(training: Training) -> None:
        target = getattr(training.model.get_submodule(module), tensor)
        with torch.no_grad():
            target.copy_(change(target.clone()))

    return apply


def trains(**options: Any) -> Apply:
    """Change the training loop."""

    def apply(training: Training) -> None:
        for name, value in options.items():
            setattr(training, name, value)

    return apply


def optimizes(matters: Callable[[str], bool], options: dict[str, float] | None) -> Apply:
    """Some parameters get other options; with None, the optimizer does not get them."""

    def groups(name: str, parameter: nn.Parameter) -> dict[str, float] | None:
        usual = usual_groups(name, parameter)
        if not matters(name) or usual is None:
            return usual
        return None if options is None else usual | options

    return trains(groups=groups)


def reads(change: Callable[[Batch], Batch]) -> Apply:
    """Change the data."""

    def apply(training: Training) -> None:
        training.batches = [[change(batch) for batch in micro] for micro in training.batches]

    return apply


def both(*applies: Apply) -> Apply:
    def apply(training: Training) -> None:
        for each in applies:
            each(training)

    return apply

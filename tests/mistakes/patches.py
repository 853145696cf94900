"""How one thing of a training is changed: a module keeps its name and class, and no random number is taken."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .running import Batch, Training, usual_groups

Apply = Callable[[Training], None]


def does(module: str, function: Callable[..., Any], method: str = "forward") -> Apply:
    """The module's method is replaced by `function(module, ...)`."""

    def apply(training: Training) -> None:
        target = training.model.get_submodule(module)
        setattr(target, method, MethodType(function, target))

    return apply


def has(module: str, **attributes: Any) -> Apply:
    """The module's plain attributes are other ones."""

    def apply(training: Training) -> None:
        for name, value in attributes.items():
            setattr(training.model.get_submodule(module), name, value)

    return apply


def holds(module: str, tensor: str, change: Callable[[Tensor], Tensor]) -> Apply:
    """A parameter or buffer of the module has other values, as from a bad checkpoint."""

    def apply(training: Training) -> None:
        target = getattr(training.model.get_submodule(module), tensor)
        with torch.no_grad():
            target.copy_(change(target.clone()))

    return apply


def trains(**options: Any) -> Apply:
    """The training loop itself is another one."""

    def apply(training: Training) -> None:
        for name, value in options.items():
            setattr(training, name, value)

    return apply


def optimizes(matters: Callable[[str], bool], options: dict[str, float] | None) -> Apply:
    """Some parameters get other options; with None, they are not handed to the optimizer at all."""

    def groups(name: str, parameter: nn.Parameter) -> dict[str, float] | None:
        usual = usual_groups(name, parameter)
        if not matters(name) or usual is None:
            return usual
        return None if options is None else usual | options

    return trains(groups=groups)


def reads(change: Callable[[Batch], Batch]) -> Apply:
    """The data are other ones."""

    def apply(training: Training) -> None:
        training.batches = [[change(batch) for batch in micro] for micro in training.batches]

    return apply


def both(*applies: Apply) -> Apply:
    def apply(training: Training) -> None:
        for each in applies:
            each(training)

    return apply

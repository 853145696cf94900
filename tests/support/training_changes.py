"""Changes of a training that every zoo of mistakes makes. No random number is drawn.

A training has a `model`, its `batches` by step and micro step, and the `groups` of its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

Apply = Callable[[Any], None]
Rule = Callable[[str, nn.Parameter], "dict[str, float] | None"]


def does(module: str, function: Callable[..., Any], method: str = "forward") -> Apply:
    """Replace the module's method by `function(module, ...)`."""

    def apply(training: Any) -> None:
        target = training.model.get_submodule(module)
        setattr(target, method, MethodType(function, target))

    return apply


def has(module: str, **attributes: Any) -> Apply:
    """Change plain attributes of the module."""

    def apply(training: Any) -> None:
        target = training.model.get_submodule(module)
        for name, value in attributes.items():
            assert hasattr(target, name), name
            setattr(target, name, value)

    return apply


def holds(module: str, tensor: str, change: Callable[[Tensor], Tensor]) -> Apply:
    """Change the values of a parameter or buffer, as a bad checkpoint does."""

    def apply(training: Any) -> None:
        target = getattr(training.model.get_submodule(module), tensor)
        with torch.no_grad():
            target.copy_(change(target.clone()))

    return apply


def trains(**options: Any) -> Apply:
    """Change the training loop."""

    def apply(training: Any) -> None:
        for name, value in options.items():
            assert hasattr(training, name), name
            setattr(training, name, value)

    return apply


def regroups(usual: Rule, matters: Callable[[str, nn.Parameter], bool], options: dict[str, float] | None) -> Apply:
    """Parameters that matter get other options than usual; with None, the optimizer does not get them."""

    def groups(name: str, parameter: nn.Parameter) -> dict[str, float] | None:
        before = usual(name, parameter)
        if not matters(name, parameter) or before is None:
            return before
        return None if options is None else before | options

    return trains(groups=groups)


def reads(change: Callable[[Any], Any]) -> Apply:
    """Change the data."""

    def apply(training: Any) -> None:
        training.batches = [[change(batch) for batch in micro] for micro in training.batches]

    return apply


def both(*applies: Apply) -> Apply:
    def apply(training: Any) -> None:
        for each in applies:
            each(training)

    return apply

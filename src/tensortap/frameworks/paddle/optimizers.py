"""Paddle's optimizers, and the wrappers of fleet, sharding and mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle

from tensortap.errors import UsageError
from tensortap.frameworks.base import Remove
from tensortap.frameworks.hooks import Detour
from tensortap.frameworks.paddle.static import uncompiled

__all__ = ["around_steps", "parameter_groups", "stepper"]

# Attributes in which wrappers keep their optimizer. `_optimizer` is that of `paddle.Model`.
_HOLDERS = ("_inner_opt", "inner_opt", "_optim", "inner_optimizer", "optimizer", "_optimizer")
_METHODS = ("step", "minimize")  # minimize does not call step


def around_steps(
    optimizer: Any, after: Callable[[], None], before: Callable[[], None] = lambda: None, otherwise: str = ""
) -> Remove:
    """Run `before` and `after` around each step of the optimizer, or of a wrapper around one.

    Raise UsageError, which ends with `otherwise`, if there is no optimizer inside.
    """
    _innermost(optimizer, otherwise)
    steps = 0

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        if not steps:
            uncompiled(before)
        steps += 1
        try:
            result = inner(*args, **kwargs)
        finally:
            steps -= 1
        if not steps:  # a wrapper's minimize, or its first step, may call its own step
            uncompiled(after)
        return result

    steps_itself = stepper(optimizer)
    detours = [Detour(steps_itself, name, around) for name in _METHODS if hasattr(steps_itself, name)]

    def remove() -> None:
        for detour in detours:
            detour.remove()

    return remove


def parameter_groups(optimizer: Any) -> Sequence[Any]:
    """Return the parameters, or dictionaries of them, that the optimizer changes; those of all ranks, if sharded."""
    for part in _chain(optimizer):
        if (whole := vars(part).get("_origin_parameter_list")) is not None:  # sharding leaves some to other ranks
            return list(whole)
    return list(_innermost(optimizer)._param_groups or ())


def _chain(optimizer: Any) -> Iterator[Any]:
    """Yield the wrapper and what it wraps, outermost first. Only own attributes count: wrappers forward others."""
    seen: set[int] = set()
    while hasattr(optimizer, "__dict__") and id(optimizer) not in seen:  # sharding makes an optimizer hold itself
        seen.add(id(optimizer))
        yield optimizer
        own = vars(optimizer)
        optimizer = next((own[name] for name in _HOLDERS if own.get(name) is not None), None)


def _innermost(optimizer: Any, otherwise: str = "") -> Any:
    found = [part for part in _chain(optimizer) if isinstance(part, paddle.optimizer.Optimizer)]
    if not found:
        raise UsageError(
            f"optimizer= takes a paddle.optimizer.Optimizer, or a wrapper around one, not a "
            f"{type(optimizer).__qualname__}{otherwise}"
        )
    return found[-1]


def stepper(optimizer: Any) -> Any:
    """Return the outermost part with a step(), since a `paddle.Model` only holds its optimizer; None without one."""
    return next((part for part in _chain(optimizer) if callable(getattr(part, "step", None))), None)

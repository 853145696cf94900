"""Torch's optimizers: their steps, also through gradient scalers, their settings and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tensortap.errors import UsageError
from tensortap.frameworks.base import Remove
from tensortap.frameworks.capabilities import OptimizerStep, ParameterGroup
from tensortap.frameworks.hooks import innermost_optimizer
from tensortap.frameworks.scalers import ScaledLosses, ScaledSteps
from tensortap.frameworks.torch.steps import after_step, before_step

__all__ = ["TorchOptimizers"]

_SCALED_LOSSES = ScaledLosses(("scale",))
_SCALED_STEPS = ScaledSteps(("step",))
_PLAIN = (bool, int, float, str, type(None))


class TorchOptimizers:
    """The capabilities `OptimizerSteps` and `LossScaling`."""

    def on_optimizer_step(
        self, optimizer: Any, before: Callable[[], None], after: Callable[[OptimizerStep], None]
    ) -> Remove:
        optimizer = innermost_optimizer(optimizer)
        if not hasattr(optimizer, "register_step_post_hook"):
            raise UsageError(
                f"optimizer= takes a torch.optim.Optimizer, not a {type(optimizer).__qualname__}; "
                "leave it out and call tap.step() after each step instead"
            )
        watch = _StepWatch(optimizer, before, after)
        with ExitStack() as undo:
            undo.callback(before_step(optimizer, watch.entered))
            undo.callback(after_step(optimizer, watch.left))
            undo.callback(_SCALED_STEPS.watch(torch.amp.GradScaler, watch))
            return undo.pop_all().close

    def optimizer_settings(self, optimizer: Any) -> Mapping[str, Any]:
        return {"class": type(innermost_optimizer(optimizer)).__name__}

    def optimizer_groups(self, optimizer: Any) -> Sequence[ParameterGroup]:
        return [
            ParameterGroup(
                {
                    name: plain
                    for name, value in group.items()
                    if name != "params" and (plain := _plain(value)) is not _NOT_PLAIN
                },
                group["params"],
            )
            for group in innermost_optimizer(optimizer).param_groups
        ]

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def on_scaled_backward(self, begins: Callable[[float], None], ends: Callable[[], None]) -> Remove:
        def scaled(scaler: Any, losses: Any) -> None:
            scale = float(scaler.get_scale())

            def begun(gradient: torch.Tensor) -> None:
                begins(scale)
                # Queued again when it is called, so that it comes after what others queue in this backward.
                queue = torch.autograd.Variable._execution_engine.queue_callback
                queue(lambda: queue(ends))

            for loss in tree_leaves(losses):
                if isinstance(loss, torch.Tensor) and loss.requires_grad:
                    loss.register_hook(begun)

        return _SCALED_LOSSES.watch(torch.amp.GradScaler, scaled)


class _StepWatch:
    """Follows the steps of one optimizer: on its own, with a closure, or through a scaler, which may skip them."""

    def __init__(self, optimizer: Any, before: Callable[[], None], after: Callable[[OptimizerStep], None]) -> None:
        self._optimizer = optimizer
        self._before = before
        self._after = after
        self._scaled = False
        """Whether a scaler's step is in progress."""
        self._stepped = False
        """Whether the optimizer has stepped in it."""
        self._skipped: bool | None = False

    def entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._skipped = _skipped_inside(self._optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        if not callable(closure):
            self._before()
            return None
        wrapped = _first_call(closure, self._before)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def left(self) -> None:
        if self._scaled:
            self._stepped = True
        else:
            self._after(OptimizerStep())

    def begins(self, scaler: Any, optimizer: Any) -> bool:
        if innermost_optimizer(optimizer) is not self._optimizer:
            return False
        self._scaled, self._stepped = True, False
        return True

    def ends(self, scaler: Any, completed: bool) -> None:
        self._scaled = False
        if not completed:
            return
        if not scaler.is_enabled():
            self._after(OptimizerStep())
            return
        skipped = self._skipped if self._stepped else True
        self._after(OptimizerStep(None if skipped is None else _scale_of(scaler), skipped))


def _first_call(closure: Callable[[], Any], after: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure that calls `after` when the original has returned for the first time."""
    calls = 0

    def called() -> Any:
        nonlocal calls
        result = closure()
        calls += 1
        if calls == 1:
            after()
        return result

    return called


def _skipped_inside(optimizer: Any) -> bool | None:
    """Return whether a fused optimizer, which decides in its own kernel, leaves the step out; None if unknown."""
    found = getattr(optimizer, "found_inf", None)
    if not isinstance(found, torch.Tensor):
        return False
    return bool(found.item()) if found.is_cpu else None  # reading it from a device would wait for the device


def _scale_of(scaler: Any) -> float | None:
    """Return the scale of a step that is over: a scaler that looks for infinities itself has waited for its device."""
    scale = getattr(scaler, "_scale", None)
    if not isinstance(scale, torch.Tensor):
        return None
    return float(scale.item())


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (tuple, list) and all(type(each) in _PLAIN for each in value):
        return tuple(value)
    if isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1:
        return value.item()
    if kind in (tuple, list) and all(isinstance(each, torch.Tensor) and each.is_cpu for each in value):
        return tuple(each.item() for each in value if each.numel() == 1)
    return _NOT_PLAIN

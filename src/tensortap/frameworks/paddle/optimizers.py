"""Paddle's optimizers, and the wrappers of fleet, sharding and mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import paddle

from tensortap.errors import UsageError
from tensortap.frameworks.base import Remove
from tensortap.frameworks.capabilities import OptimizerStep, ParameterGroup
from tensortap.frameworks.hooks import Detour
from tensortap.frameworks.paddle.static import uncompiled
from tensortap.frameworks.scalers import ScaledLosses, ScaledSteps

__all__ = ["PaddleOptimizers", "around_steps", "parameter_groups", "stepper"]

# Attributes in which wrappers keep their optimizer. `_optimizer` is that of `paddle.Model`.
_HOLDERS = ("_inner_opt", "inner_opt", "_optim", "inner_optimizer", "optimizer", "_optimizer")
_METHODS = ("step", "minimize")  # minimize does not call step
_SCALED_LOSSES = ScaledLosses(("scale",))
_SCALED_STEPS = ScaledSteps(_METHODS)
_PLAIN = (bool, int, float, str, type(None))
# Paddle's names of settings, and torch's.
_SETTINGS = {
    "_epsilon": "eps",
    "epsilon": "eps",
    "_momentum": "momentum",
    "_use_nesterov": "nesterov",
    "_weight_decay": "weight_decay",
    "weight_decay": "weight_decay",
    "_regularization_coeff": "weight_decay",
    "_amsgrad": "amsgrad",
    "_rho": "rho",
    "_centered": "centered",
    "_lr_ratio": "lr_ratio",
    "_multi_precision": "multi_precision",
    "_master_grad": "master_grad",
    "_lazy_mode": "lazy_mode",
}


class PaddleOptimizers:
    """The capabilities `OptimizerSteps` and `LossScaling`."""

    def on_optimizer_step(
        self, optimizer: Any, before: Callable[[], None], after: Callable[[OptimizerStep], None]
    ) -> Remove:
        watch = _StepWatch(_innermost(optimizer, _INSTEAD), after)
        with ExitStack() as undo:
            undo.callback(around_steps(optimizer, watch.left, before, _INSTEAD))
            undo.callback(_SCALED_STEPS.watch(paddle.amp.GradScaler, watch))
            return undo.pop_all().close

    def optimizer_settings(self, optimizer: Any) -> Mapping[str, Any]:
        inner = _innermost(optimizer)
        clip = getattr(inner, "_grad_clip", None)
        return {"class": type(inner).__name__} | ({} if clip is None else {"clipping": _clipping(clip)})

    def optimizer_groups(self, optimizer: Any) -> Sequence[ParameterGroup]:
        inner = _innermost(optimizer)
        own = _settings(vars(inner)) | {"lr": float(inner.get_lr())}
        groups = list(inner._param_groups or ())
        if not groups or not isinstance(groups[0], dict):
            return [ParameterGroup(own, parameter_groups(optimizer))]
        return [ParameterGroup(own | _settings(group) | _rate(group, own["lr"]), group["params"]) for group in groups]

    def gradient_of(self, parameter: Any) -> Any | None:
        main = getattr(parameter, "main_grad", None)  # of master-grad training, which clears the other
        return parameter.grad if main is None else main

    def on_scaled_backward(self, begins: Callable[[float], None], ends: Callable[[], None]) -> Remove:
        return _SCALED_LOSSES.watch(paddle.amp.GradScaler, lambda scaler, _: begins(_scale_of(scaler) or 1.0))


class _StepWatch:
    """Follows the steps of one optimizer: on its own, or through a scaler, which may skip them."""

    def __init__(self, optimizer: Any, after: Callable[[OptimizerStep], None]) -> None:
        self._optimizer = optimizer
        self._after = after
        self._scale: float | None = None
        self._scaled = 0
        """Number of a scaler's steps in progress: one may call another."""
        self._stepped = False

    def left(self) -> None:
        if self._scaled:
            self._stepped = True
        else:
            self._after(OptimizerStep())

    def begins(self, scaler: Any, optimizer: Any) -> bool:
        if not any(part is self._optimizer for part in _chain(optimizer)):
            return False
        if not self._scaled:
            self._stepped = False
            self._scale = _scale_of(scaler)  # minimize changes it
        self._scaled += 1
        return True

    def ends(self, scaler: Any, completed: bool) -> None:
        self._scaled -= 1
        if not self._scaled and completed:
            # The optimizer's step runs all the same, finds the flag, and changes nothing.
            skipped = self._scale is not None and (not self._stepped or bool(scaler._found_inf))
            uncompiled(partial(self._after, OptimizerStep(self._scale, skipped)))


def _scale_of(scaler: Any) -> float | None:
    """Return the scale of a scaler; None if it is disabled."""
    return float(scaler._scale.item()) if scaler.is_enable() else None


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by torch's names."""
    found = {name: values[own] for own, name in _SETTINGS.items() if own in values and type(values[own]) in _PLAIN}
    betas = tuple(values.get(f"_beta{number}", values.get(f"beta{number}")) for number in (1, 2))
    if all(type(beta) is float for beta in betas):
        found["betas"] = betas
    if (clip := values.get("grad_clip")) is not None:
        found["clipping"] = _clipping(clip)
    return found


def _rate(group: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """Return the rate of a group whose own is a factor of the optimizer's."""
    factor = group.get("learning_rate")
    return {"lr": rate * factor} if isinstance(factor, (int, float)) else {}


def _clipping(clip: Any) -> str:
    """
    >>> _clipping(paddle.nn.ClipGradByGlobalNorm(1.0))                         # doctest: +SKIP
    'ClipGradByGlobalNorm(clip_norm=1.0)'
    """
    plain = [f"{name}={value!r}" for name, value in sorted(vars(clip).items()) if type(value) in (bool, int, float)]
    return f"{type(clip).__name__}({', '.join(each for each in plain if not each.startswith('_'))})"


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


_INSTEAD = "; leave it out and call tap.step() after each step instead"


def stepper(optimizer: Any) -> Any:
    """Return the outermost part with a step(), since a `paddle.Model` only holds its optimizer; None without one."""
    return next((part for part in _chain(optimizer) if callable(getattr(part, "step", None))), None)

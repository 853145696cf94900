"""Captures the models that an Accelerator has prepared.

>>> from tensortap.integrations.accelerate import capture                      # doctest: +SKIP
>>> model, optimizer, data = accelerator.prepare(model, optimizer, data)
>>> with capture(accelerator, "runs/a"):
...     for batch in data:
...         with accelerator.accumulate(model):
...             accelerator.backward(model(batch).mean())
...             optimizer.step()
...             optimizer.zero_grad()
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.capture import capture as capture_model
from tensortap.errors import UsageError

if TYPE_CHECKING:
    from tensortap.capture.tap import Tap

__all__ = ["capture"]


def capture(accelerator: Any, path: str | Path | None = None, **options: Any) -> Tap:
    """Tap the models that the accelerator has prepared, and count the steps of the optimizers that it has prepared.

    The other arguments are those of `tensortap.capture`, and so is the result. With accumulation, a step is an
    optimizer step, and its micro steps are the forwards. Several models are named model_0, model_1 and so on.
    """
    models, optimizers = list(accelerator._models), list(accelerator._optimizers)
    if not models:
        raise UsageError("the accelerator has prepared no model: call accelerator.prepare(model, ...) first")
    if optimizers and "optimizer" not in options:
        options["optimizer"] = optimizers if len(optimizers) > 1 else optimizers[0]
    named = {f"model_{number}": model for number, model in enumerate(models)}
    return capture_model(named if len(models) > 1 else models[0], path, **options)

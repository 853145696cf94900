"""How far each record of a model moves when all that a module works with is off by one epsilon."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensortap.capture import capture
from tensortap.capture.flatten import open_value
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of
from tensortap.frameworks.base import Framework
from tensortap.isolate.check import Check, Options
from tensortap.records import KINDS
from tensortap.store.noise_file import Spot, write_noise

__all__ = ["measure_noise"]

_KINDS = tuple(kind for kind in KINDS if kind != "param")  # parameters are what is moved
Spreads = dict[Spot, tuple[float, float]]


def measure_noise(
    model: Any, work: Any, path: Path, seeds: int, overwrite: bool, progress: Callable[[int, int], None] | None
) -> None:
    """Run the model once as it is and once for each seed; see `tensortap.noise`."""
    if seeds < 1:
        raise UsageError(f"seeds must be 1 or more, not {seeds}: each is a run with other random steps")
    framework = framework_of(model)
    run = work if callable(work) else lambda model: _forward_and_backward(framework, model, work)
    spreads: Spreads = {}
    put_back = framework.remember(model)
    with tempfile.TemporaryDirectory(prefix="tensortap-noise-") as folder:
        reference = Path(folder) / "reference"
        try:
            with capture(model, reference, keep="tensors", kinds=_KINDS):
                run(model)
            for seed in range(seeds):
                put_back()
                _measure(model, run, Check(model, reference, Options(seed=seed)), spreads)
                if progress is not None:
                    progress(seed + 1, seeds)
        finally:
            put_back()
    about = {"seeds": str(seeds), "model": type(model).__qualname__, "framework": framework.name}
    write_noise(path, spreads.items(), about, overwrite)


def _measure(model: Any, run: Callable[[Any], Any], check: Check, spreads: Spreads) -> None:
    with check:
        check.perturb_parameters()
        run(model)
    for key, error, row_error in check.errors():
        spot = key.module, key.call, key.kind, key.path
        before = spreads.get(spot, (0.0, 0.0))
        spreads[spot] = max(before[0], error), max(before[1], row_error)


def _forward_and_backward(framework: Framework, model: Any, batch: Any) -> None:
    """Of a batch alone: backward starts at the loss if the model returns one, else everywhere at its outputs."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    tensors = [t for _, t in open_value(output, framework.is_tensor).tensors if framework.requires_gradient(t)]
    losses = [tensor for tensor in tensors if not tuple(tensor.shape)]
    framework.backward(losses or tensors)

"""Measures how far each record of a model moves if inputs and parameters of its module change by one epsilon."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tensortap.capture import capture
from tensortap.capture.modules.models import one_model
from tensortap.capture.watching.flatten import open_value
from tensortap.compare.judge.rules.rounding import EPSILON
from tensortap.core.records import MODULE_KINDS
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import Reruns
from tensortap.isolate.check import Check, CheckOptions
from tensortap.store import open_run
from tensortap.store.noise_file import Spot, write_noise

__all__ = ["measure_noise"]

_KINDS = tuple(kind for kind in MODULE_KINDS if kind not in ("param", "step_grad"))
"""Parameters are perturbed, not measured, and no optimizer steps."""
_OWN_KINDS = ("output", "grad_input", "param_grad")
"""Kinds that a module itself computes; the code around it makes the others."""
_PROBE, _JUMP = 16, 16
"""Epsilons of the probing perturbation; amplification by which a module is known to round to a coarser dtype."""

Spreads = dict[Spot, tuple[float, float]]


def measure_noise(
    model: Any, work: Any, path: Path, seeds: int, overwrite: bool, progress: Callable[[int, int], None] | None
) -> None:
    """Run the model once unchanged and once for each seed; see `tensortap.noise`."""
    if seeds < 1:
        raise UsageError(f"seeds must be 1 or more, not {seeds}: each is a run with other random perturbations")
    if isinstance(model, Mapping) and not callable(work):
        raise UsageError("several models have no common batch: pass a function of the dict that runs them")
    network = network_of(one_model(model))
    framework = framework_of(network)
    reruns: Reruns = require(framework, Reruns, "measuring noise")
    run = work if callable(work) else lambda _: _forward_and_backward(framework, reruns, network, work)
    spreads: Spreads = {}
    lowered: Mapping[str, str] = {}
    restore_model, random_states = reruns.save_state(network), (random.getstate(), np.random.get_state())

    def restore() -> None:
        restore_model()
        random.setstate(random_states[0])
        np.random.set_state(random_states[1])

    with tempfile.TemporaryDirectory(prefix="tensortap-noise-") as folder:
        reference = Path(folder) / "reference"

        def perturbed(seed: int, epsilons: int = 1) -> Check:
            restore()
            with Check(model, reference, CheckOptions(seed=seed, epsilons=epsilons, lowered=lowered)) as check:
                check.perturb_parameters()
                run(model)
            return check

        try:
            with capture(model, reference, keep="tensors", kinds=_KINDS):
                run(model)
            with open_run(reference) as seen:
                if not len(seen):
                    raise UsageError("the work ran no module of the model: it receives the model and must call it")
            lowered = _find_lowered(perturbed(0, _PROBE))
            for seed in range(seeds):
                _collect(perturbed(seed), spreads)
                if progress is not None:
                    progress(seed + 1, seeds)
        finally:
            restore()
    about = {"seeds": str(seeds), "model": type(network).__qualname__, "framework": framework.name}
    write_noise(path, spreads.items(), about, overwrite)


def _find_lowered(check: Check) -> dict[str, str]:
    """Return modules that take and return one dtype but compute in a coarser one, as under autocast, with that dtype.

    Perturbations too small for the inner dtype appear as jumps where they flip a rounding. The inner dtype is unknown,
    so the coarsest dtype anywhere in the model is assumed.
    """
    coarsest = check.coarsest()
    floats = [dtype for dtype in coarsest.values() if dtype is not None]
    lowest = max(floats, key=EPSILON.__getitem__, default="")
    found = {}
    for key, error, _ in check.errors():
        own = coarsest.get(key.module) if key.kind in _OWN_KINDS else None
        if own is not None and EPSILON[own] < EPSILON[lowest] and error > _JUMP * _PROBE * EPSILON[own]:
            found[key.module] = lowest
    return found


def _collect(check: Check, spreads: Spreads) -> None:
    for key, error, row_error in check.errors():
        where = key.module, key.call, key.kind, key.path
        before = spreads.get(where, (0.0, 0.0))
        spreads[where] = max(before[0], error), max(before[1], row_error)


def _forward_and_backward(framework: Framework, reruns: Reruns, model: Any, batch: Any) -> None:
    """Run a batch; backward starts at the loss if the model returns one, else at all its outputs."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    tensors = [t for _, t in open_value(output, framework.is_tensor).tensors if framework.requires_gradient(t)]
    losses = [tensor for tensor in tensors if not tuple(tensor.shape)]
    reruns.run_backward(losses or tensors)

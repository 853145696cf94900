"""Compares a model with its compiled self: the same step from the same state, uncompiled and compiled."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tensortap.capture import capture
from tensortap.capture.modules.tree import Tree
from tensortap.capture.selection import DEFAULT_KINDS
from tensortap.compare import compare
from tensortap.core.records import Comparison
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of, require
from tensortap.frameworks.capabilities import ExactExecution, InsideGraphs, Reruns
from tensortap.store import Run

__all__ = ["CompiledOptions", "compare_compiled"]


@dataclass(frozen=True)
class CompiledOptions:
    """The options of `tensortap.check_compiled`."""

    compile: Mapping[str, Any] | None
    truth: str | None
    path: Path | None
    modules: Any
    emulate_casts: bool
    rtol: float | None
    atol: float | None
    overwrite: bool

    def __post_init__(self) -> None:
        if self.truth not in (None, "float64"):
            raise UsageError(f'truth: {self.truth!r} is not "float64"')


def compare_compiled(model: Any, step: Callable[[Any], Any], options: CompiledOptions) -> Comparison:
    """Run a step uncompiled and compiled, and compare the two; see `tensortap.check_compiled`."""
    if not callable(step):
        raise UsageError(f"step: {type(step).__name__} is not a function that takes the model and runs a training step")
    network = network_of(model)
    framework = framework_of(network)
    graphs: InsideGraphs = require(framework, InsideGraphs, "check_compiled")
    reruns: Reruns = require(framework, Reruns, "check_compiled")
    tree = Tree(framework, network)
    is_compiled = any(site.compiled for site in tree.sites)
    if is_compiled and options.compile is not None:
        raise UsageError("compile= is for a model that is not compiled, and this one is: leave it out")
    restore_model, states = reruns.save_state(network), (random.getstate(), np.random.get_state())

    def restore() -> None:
        restore_model()
        random.setstate(states[0])
        np.random.set_state(states[1])

    def run_of(what: str, called: Any, **tap_options: Any) -> Run:
        path = None if options.path is None else options.path / what
        tap_options |= {"keep": "tensors", "kinds": DEFAULT_KINDS, "modules": options.modules, "on_error": "raise"}
        with capture(called, path, overwrite=options.overwrite and path is not None, **tap_options) as tap:
            step(called)
        if not len(tap.run):
            raise UsageError("the step ran no module of the model: it receives the model, and must call that one")
        return tap.run

    try:
        eager = run_of("eager", network, compiled="eager" if is_compiled else "boundary")
        restore()
        called = network if is_compiled else graphs.compile(network, options.compile or {})
        inside = run_of("compiled", called, compiled="inside", emulate_casts=options.emulate_casts)
        truth = None
        if options.truth is not None:
            restore()
            exact: ExactExecution = require(framework, ExactExecution, 'truth="float64"')
            twin = exact.exact_copy(tree.sites[0].owner)
            with exact.exactly(lambda: None, autograd=True):
                truth = run_of("truth", twin)
    finally:
        restore()
    measured = partial(compare, eager, inside, rtol=options.rtol, atol=options.atol)
    return measured() if truth is None else measured(truth=truth)

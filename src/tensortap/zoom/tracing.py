"""Runs one module under a trace of its operators, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tensortap.capture.flatten import open_arguments, open_value
from tensortap.capture.tree import Tree
from tensortap.core.operators import OperatorTrace
from tensortap.errors import UsageError
from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import ExactExecution, Reruns
from tensortap.frameworks.operators import tracer_of

__all__ = ["Call", "TracedCall", "trace_call"]


@dataclass(frozen=True)
class Call:
    """What both modules are called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    gradients: Mapping[str, Any] = field(default_factory=dict)
    """Gradients of outputs by path; outputs without one get fixed random values."""


@dataclass(frozen=True)
class TracedCall:
    """The operators of one call, and the values that leave it."""

    trace: OperatorTrace
    outputs: Mapping[str, int]
    """Values of the outputs by path."""
    gradients: Mapping[str, int | None]
    """Values of the gradients of inputs and parameters by name; None for one that gets no gradient."""
    failure: str = ""
    """Why the backward failed; empty if it ran."""


def trace_call(
    framework: Framework, module: Any, call: Call, side: str, exact: bool = False, backward: bool = True
) -> TracedCall:
    """Run a module under a trace. Parameters, buffers and the random state stay as they were.

    side: "reference" or "candidate", for messages.
    exact: run a copy of the module in float64. Raise if the module cannot be copied.
    backward: run the backward, too.
    """
    reruns: Reruns = require(framework, Reruns, "tracing operators")
    restore = reruns.save_state(module)
    try:
        with ExitStack() as stack:
            if exact:
                exactly: ExactExecution = require(framework, ExactExecution, "float64")
                module = exactly.exact_copy(module)
                stack.enter_context(exactly.exactly(_ignore_draws, autograd=True))
            return _trace(framework, module, call, side, exact, backward)
    finally:
        restore()


def _ignore_draws() -> None:
    """Both sides draw from the same random state, so that draws need no notice."""


def _trace(framework: Framework, module: Any, call: Call, side: str, exact: bool, backward: bool) -> TracedCall:
    tracer = tracer_of(framework)
    (args, kwargs), leaves = tracer.fresh((call.args, dict(call.kwargs)), exact)
    inputs = open_arguments(args, kwargs, framework.is_tensor).tensors
    modules = [(site.name, site.owner) for site in Tree(framework, module).sites]
    recorder = tracer.operator_recorder(modules)
    sources: list[tuple[str, Any]] = [(f"input {path}", leaves[id(tensor)]) for path, tensor in inputs]
    for path, tensor in inputs:
        recorder.name_source(tensor, f"input {path}")
    for name, tensor in tracer.state(module):
        recorder.name_source(tensor, name)
        sources.append((name, tensor))
    with recorder, _reporting(f"the {side} failed on these inputs"):
        output = module(*args, **kwargs)
    opened = open_value(output, framework.is_tensor).tensors
    recorder.end_forward()
    outputs = {path: recorder.value_of(tensor) for path, tensor in opened}
    gradients: dict[str, int | None] = {}
    failure = ""
    try:
        if backward:
            gradients = _backward(framework, recorder, opened, sources, call.gradients)
    except RuntimeError as error:  # autograd's own refusal, as of a tensor that was changed in place
        failure = f"{type(error).__name__}: {error}"
    return TracedCall(recorder.trace, outputs, gradients, failure)


def _backward(
    framework: Framework,
    recorder: Any,
    opened: Sequence[tuple[str, Any]],
    sources: Sequence[tuple[str, Any]],
    given: Mapping[str, Any],
) -> dict[str, int | None]:
    tracer = tracer_of(framework)
    distinct: dict[int, tuple[str, Any]] = {}
    for path, tensor in opened:
        if framework.requires_gradient(tensor):
            distinct.setdefault(id(tensor), (path, tensor))
    paths = [path for path, _ in distinct.values()]
    tensors = [tensor for _, tensor in distinct.values()]
    sent = tracer.output_gradients(tensors, [given.get(path) for path in paths])
    for path, gradient in zip(paths, sent, strict=True):
        recorder.name_source(gradient, f"gradient of output {path}")
    with recorder:
        gradients = tracer.input_gradients(tensors, sent, [tensor for _, tensor in sources])
    return {
        name: None if gradient is None else recorder.value_of(gradient)
        for (name, tensor), gradient in zip(sources, gradients, strict=True)
        if framework.requires_gradient(tensor)
    }


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Raise errors of a user's module as UsageError."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{what}: {type(error).__name__}: {error}") from error

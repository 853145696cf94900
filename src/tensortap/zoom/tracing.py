"""Runs one module under a trace of its operators, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensortap.capture.modules.tree import Tree
from tensortap.capture.watching.flatten import open_arguments, open_value
from tensortap.core.operators import OperatorTrace
from tensortap.errors import UsageError
from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import ExactExecution, Reruns
from tensortap.frameworks.operators import tracer_of

__all__ = ["Call", "TracedCall", "trace_call", "trace_exactly"]


@dataclass(frozen=True)
class Call:
    """The arguments with which both modules are called, and gradients of their outputs."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    gradients: Mapping[str, Any] = field(default_factory=dict)
    """Gradients of outputs by path; outputs without one get fixed random values."""


class TracedCall:
    """The operators of one call, and the values that leave it."""

    def __init__(
        self, framework: Framework, module: Any, call: Call, side: str, exact: bool, around: Callable[[], Any]
    ) -> None:
        """Run the forward. `around` returns the context in which operators run."""
        self._framework, self._tracer, self._around = framework, tracer_of(framework), around
        tracer = self._tracer
        with around():
            (args, kwargs), leaves = tracer.fresh((call.args, dict(call.kwargs)), exact)
            inputs = open_arguments(args, kwargs, framework.is_tensor).tensors
            self._recorder = tracer.operator_recorder(
                [(site.name, site.owner) for site in Tree(framework, module).sites]
            )
            self._sources = {f"input {path}": leaves[id(tensor)] for path, tensor in inputs}
            for path, tensor in inputs:
                self._recorder.name_source(tensor, f"input {path}")
            for name, tensor in tracer.state(module):
                self._recorder.name_source(tensor, name)
                self._sources[name] = tensor
            with self._recorder, _reporting(f"the {side} failed on these inputs"):
                output = module(*args, **kwargs)
            opened = open_value(output, framework.is_tensor).tensors
            self._recorder.end_forward()
            self.outputs: Mapping[str, int] = {path: self._recorder.value_of(tensor) for path, tensor in opened}
            """Values of the outputs by path."""
            self._prepare_backward(opened, call.gradients)
        self.gradients: dict[str, int | None] = {}
        """Values of the gradients of inputs and parameters by name; None for one that gets no gradient."""
        self.failure = ""
        """Why the backward failed; empty if it ran, or has not run yet."""

    @property
    def trace(self) -> OperatorTrace:
        return self._recorder.trace

    def _prepare_backward(self, opened: Sequence[tuple[str, Any]], given: Mapping[str, Any]) -> None:
        distinct: dict[int, tuple[str, Any]] = {}
        for path, tensor in opened:
            if self._framework.requires_gradient(tensor):
                distinct.setdefault(id(tensor), (path, tensor))
        paths = [path for path, _ in distinct.values()]
        self._outputs = [tensor for _, tensor in distinct.values()]
        self._sent = self._tracer.output_gradients(self._outputs, [given.get(path) for path in paths])
        for path, gradient in zip(paths, self._sent, strict=True):
            self._recorder.name_source(gradient, f"gradient of output {path}")

    def run_backward(self, names: Container[str] | None = None) -> None:
        """Compute the gradients of these inputs and parameters, or of all. Those that are known already stay."""
        wanted = {
            name: tensor
            for name, tensor in self._sources.items()
            if (names is None or name in names)
            and name not in self.gradients
            and self._framework.requires_gradient(tensor)
        }
        try:
            with self._around(), self._recorder:
                found = self._tracer.input_gradients(
                    self._outputs, self._sent, list(wanted.values()), retain=names is not None
                )
        except RuntimeError as error:  # autograd's own refusal, as of a tensor that was changed in place
            self.failure = f"{type(error).__name__}: {error}"
            return
        for name, gradient in zip(wanted, found, strict=True):
            self.gradients[name] = None if gradient is None else self._recorder.value_of(gradient)


def trace_call(framework: Framework, module: Any, call: Call, side: str) -> TracedCall:
    """Run a module under a trace, forward and backward. Parameters, buffers and the random state stay as they were.

    side: "reference" or "candidate", for messages.
    """
    reruns: Reruns = require(framework, Reruns, "tracing operators")
    restore = reruns.save_state(module)
    try:
        traced = TracedCall(framework, module, call, side, False, nullcontext)
        traced.run_backward()
        return traced
    finally:
        restore()


def trace_exactly(framework: Framework, module: Any, call: Call, side: str) -> TracedCall:
    """Run the forward of a copy of a module in float64 under a trace. Raise if the module cannot be copied."""
    exactly: ExactExecution = require(framework, ExactExecution, "float64")
    around = partial(exactly.exactly, _ignore_draws, autograd=True)
    return TracedCall(framework, exactly.exact_copy(module), call, side, True, around)


def _ignore_draws() -> None:
    """Both sides draw from the same random state, so that draws need no notice."""


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Raise errors of a user's module as UsageError."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{what}: {type(error).__name__}: {error}") from error

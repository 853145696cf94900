"""The contract for operators below the modules: their names, source lines and values.

A recorder holds all values of one call, for zoom. A watch shows each value once while a model trains, and holds none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tensortap.core.operators import Operator, OperatorTrace, SourceLine
from tensortap.frameworks.base import Framework, Remove, require
from tensortap.frameworks.capabilities import OperatorTraces

__all__ = ["Guard", "OperatorRan", "OperatorRecorder", "OperatorTracer", "OperatorWatch", "Sent", "tracer_of"]

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a callback, so that an error in it stops the recording and not the training."""
Sent = Callable[[Sequence[Any]], None]
"""Called with the gradients that the backward of an operator has computed, None where it computes none."""
OperatorRan = Callable[[str, "SourceLine | None", Sequence[Any]], "Sent | None"]
"""Called with the name, line and results of an operator. Returns the callback for its gradients, if they are wanted."""


class OperatorWatch(Protocol):
    """Shows the operators of one thread while they run."""

    def start(self) -> None:
        """Show the operators that this thread runs from now on."""

    def stop(self) -> None:
        """Show no more operators. All operators that have run are complete now."""


class OperatorRecorder(Protocol):
    """A block in which every operator is recorded. It may be entered several times."""

    trace: OperatorTrace

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...

    def name_source(self, tensor: Any, name: str) -> int:
        """Record an input, a parameter or a buffer under its name, and return the number of its value."""

    def value_of(self, tensor: Any) -> int:
        """Return the number of the value that a tensor has now."""

    def end_forward(self) -> None:
        """Note which values take part in autograd."""


class OperatorTracer(Protocol):
    """Operators below the modules: their names, source lines and values."""

    def operator_recorder(self, modules: Iterable[tuple[str, Any]]) -> OperatorRecorder:
        """Return a recorder of operators, with the innermost of these modules for each."""

    def operator_watch(self, ran: OperatorRan, hold: Callable[[Remove], None], guard: Guard) -> OperatorWatch:
        """Return a watch that shows operators to `ran`, each once.

        Views and uninitialised memory are left out. An autograd Function, a custom operator and a Triton kernel are one
        operator each. `hold` gets the function that removes a hook on the graph; such a hook belongs to the step.
        """

    def fresh(self, value: Any, exact: bool) -> tuple[Any, dict[int, Any]]:
        """Return a copy of nested arguments for one call, and its leaf for the id of each tensor in it.

        `exact` turns floating-point tensors into float64.
        """

    def state(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Return the parameters and buffers of a module by name."""

    def output_gradients(self, outputs: Sequence[Any], given: Sequence[Any | None]) -> list[Any]:
        """Return a gradient for each output: the given one, else 1 for a scalar and fixed random values for others."""

    def input_gradients(
        self, outputs: Sequence[Any], gradients: Sequence[Any], leaves: Sequence[Any], retain: bool = False
    ) -> list[Any | None]:
        """Run backward and return the gradient of each leaf, without an effect on the leaves.

        retain: keep what a further backward needs.
        """

    def expand(self, trace: OperatorTrace, operator: Operator) -> Sequence[Sequence[Operator]]:
        """Append the parts of a fused operator to its trace; return them for each way to compute it."""


def tracer_of(framework: Framework) -> OperatorTracer:
    """Return the operator tracer of this framework."""
    supported: OperatorTraces = require(framework, OperatorTraces, "tracing operators")
    return supported.operator_tracer()

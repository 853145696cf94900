"""The contract for tracing operators: what ran below the modules, on which line, with which values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tensortap.core.operators import Operator, OperatorTrace
from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import OperatorTraces

__all__ = ["OperatorRecorder", "OperatorTracer", "tracer_of"]


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
    """Operators below the modules: what ran, on which line, with which values."""

    def operator_recorder(self, modules: Iterable[tuple[str, Any]]) -> OperatorRecorder:
        """Return what records operators, with the innermost of these modules for each."""

    def fresh(self, value: Any, exact: bool) -> tuple[Any, dict[int, Any]]:
        """Return a copy of nested arguments for one call, and its leaf for the id of each tensor in it.

        `exact` turns floating-point tensors into float64.
        """

    def state(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Return the parameters and buffers of a module by name."""

    def output_gradients(self, outputs: Sequence[Any], given: Sequence[Any | None]) -> list[Any]:
        """Return a gradient for each output: the given one, else 1 for a scalar and fixed random values for others."""

    def input_gradients(
        self, outputs: Sequence[Any], gradients: Sequence[Any], leaves: Sequence[Any]
    ) -> list[Any | None]:
        """Run backward and return the gradient of each leaf, without an effect on the leaves."""

    def expand(self, trace: OperatorTrace, operator: Operator) -> Sequence[Sequence[Operator]]:
        """Append the parts of a fused operator to its trace; return them for each way to compute it."""


def tracer_of(framework: Framework) -> OperatorTracer:
    """Return what traces operators of this framework."""
    supported: OperatorTraces = require(framework, OperatorTraces, "tracing operators")
    return supported.operator_tracer()

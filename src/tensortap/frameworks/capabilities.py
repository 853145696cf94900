"""The needs of single features beyond capture: one small protocol each.

A framework supports a capability if it has its methods; `base.require` checks that once, where a feature starts. A
framework without them still captures, and each feature reports what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tensortap.frameworks.base import Framework, Remove

if TYPE_CHECKING:
    from tensortap.frameworks.discovery import Discovery
    from tensortap.frameworks.loading import Loading
    from tensortap.frameworks.operators import OperatorTracer
    from tensortap.frameworks.ownership import Ownership
    from tensortap.frameworks.player import Player
    from tensortap.frameworks.profiling import Profiling
    from tensortap.frameworks.registered import TensorRegistration

__all__ = [
    "CheckpointLoading",
    "Consumer",
    "DeviceMark",
    "DeviceTimeline",
    "EagerExecution",
    "Edge",
    "ExactExecution",
    "GradientGraph",
    "GradientReplacer",
    "GraphPoint",
    "GraphReceiver",
    "GraphTaps",
    "InsideGraphs",
    "OperatorTraces",
    "OptimizerStep",
    "OptimizerSteps",
    "ParameterGroup",
    "ProfilerSpans",
    "ReplayedCalls",
    "Reruns",
    "StateRegistration",
    "Substitution",
    "TensorOwnership",
    "TrainingDiscovery",
    "ValueWriting",
]

GradientReplacer = Callable[[Any], "npt.NDArray[np.generic] | None"]
"""Called with a gradient during backward. May return the values that propagate instead."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The point in the autograd graph at which a tensor's gradient arrives."""

    node: Any
    slot: int
    shape: tuple[int, ...] = ()
    """The tensor's own shape. A gradient that arrives through the base is reshaped to it."""
    base: Edge | None = None
    """The edge of the tensor that this one is a view of. An in-place change reroutes the gradient there."""
    tensor: Any = field(default=None, compare=False)
    """The tensor itself, where only a hook on it separates its gradient from those of its operation's other outputs."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A graph node that sends gradient along an edge, as the gradient with this index among those it sends."""

    node: Any
    index: int
    edge: Edge
    rivals: tuple[Edge, ...] = ()
    """Further candidate edges, where the framework does not separate the outputs of one operation."""


class GradientGraph(Protocol):
    """The autograd graph, for the share of an input's gradient that one module contributes (kind grad_input)."""

    def edge(self, tensor: Any) -> Edge | None:
        """Return the edge at which this tensor's gradient would arrive now; None if it takes no part in autograd."""

    def consumers(self, outputs: Iterable[Any], edges: Sequence[Edge], mark: int) -> list[Consumer]:
        """Return the nodes between `outputs` and `edges`, made since `mark`, that feed one of the edges."""

    def on_node(self, node: Any, seen: Callable[[Sequence[Any] | None], None]) -> Remove | None:
        """Call back when this node has computed the gradients that it sends. Return None if that is impossible.

        `seen` gets the gradients in the order of `Consumer.index`, or None if their order is unknown.
        """

    def count_uses(self, node: Any) -> Callable[[], int | None]:
        """Return a function that, called in backward, returns how many gradients this backward sends to the node.

        The function returns None if the number is unknown. It keeps no node alive.
        """

    def address(self, tensor: Any) -> int:
        """Return the address of the elements: equal for two live tensors that share them. 0 if there are none."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The outcome of an optimizer step."""

    scale: float | None = None
    """The scale of the gradient scaler that ran the step; None without one, or if it is only known on a device."""
    skipped: bool | None = False
    """Whether a gradient scaler skipped the step; None if that is only known on a device."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A group of parameters of an optimizer."""

    settings: Mapping[str, Any]
    """Plain values by name, with the names that torch uses: lr, betas, eps, weight_decay, momentum, ..."""
    parameters: Sequence[Any]


class OptimizerSteps(Protocol):
    """Steps that are counted through `optimizer=`. Each method takes a wrapper for the optimizer that it wraps."""

    def on_optimizer_step(
        self, optimizer: Any, before: Callable[[], None], after: Callable[[OptimizerStep], None]
    ) -> Remove:
        """Call back around each step of the optimizer, also one that a gradient scaler skips.

        `before` is called once for a step, when its gradients are known: after the first closure, if there is one. It
        is not called for a skipped step.
        """

    def optimizer_settings(self, optimizer: Any) -> Mapping[str, Any]:
        """Return the optimizer's class as `class`, and plain settings that belong to no group."""

    def optimizer_groups(self, optimizer: Any) -> Sequence[ParameterGroup]:
        """Return the optimizer's parameter groups, with their current settings."""

    def gradient_of(self, parameter: Any) -> Any | None:
        """Return the gradient that a step would use; None if the parameter has none."""


class LossScaling(Protocol):
    """Gradient scalers, which multiply a loss before its backward."""

    def on_scaled_backward(self, begins: Callable[[float], None], ends: Callable[[], None]) -> Remove:
        """Call back around each backward of a loss that a scaler has multiplied; with its scale, 1 if it is disabled.

        A framework that does not show when a backward ends never calls `ends`.
        """


class DeviceMark(Protocol):
    """A point on the timeline of a device."""

    def seconds_to(self, later: Any) -> float | None:
        """Return the time between two marks; None if the device has not reached the later one. Never wait for it."""


class DeviceTimeline(Protocol):
    """Durations on a device that runs beside the host, for `budget=`."""

    def device_mark(self, model: Any) -> DeviceMark | None:
        """Return a mark at the current point of the model's device; None if the model computes on the host."""


class EagerExecution(Protocol):
    """Compiled modules that can run uncompiled."""

    def run_eagerly(self) -> Remove:
        """Make compiled modules run uncompiled, so that every module is seen."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphPoint:
    """A place in compiled code that shows tensors of a call. A graph has it once; equal layers share their code."""

    event: str
    """enter, leave, grad_input or grad_output."""
    call: int
    """Number of the call within the graph."""
    spec: Mapping[str, Any]
    """The known facts about the call and its tensors."""


class GraphReceiver(Protocol):
    """Receives the events of one module inside compiled graphs."""

    def event(self, point: GraphPoint, run: int, values: Sequence[Any]) -> None:
        """Take the tensors at a point. `run` is the number of a run of the graph, which forward and backward share."""

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take a call that runs uncompiled, as after a graph break."""

    def after(self, output: Any) -> None:
        """Take the output of such a call."""


class GraphTaps(Protocol):
    """The taps of one observer inside compiled graphs."""

    rounding: str
    """A notice: whether taps change the rounding of compiled code."""

    @property
    def traced(self) -> int:
        """Number of graphs traced so far. Other code uses memory in another way."""

    @property
    def notices(self) -> Sequence[str]:
        """Notices on changes in the graphs so far that taps may cause, beside their rounding."""

    @property
    def replays(self) -> bool:
        """Whether compiled code may run in an order that its own code does not show, so that no tensor keeps its
        values.
        """

    def place(self, wanted: Mapping[int, tuple[Any, GraphReceiver]], called: Sequence[Any]) -> bool:
        """Tap these modules, by id, and no others. Return whether code that was compiled before is dropped.

        `called` are those that are called from outside of graphs, among them compiled wrappers.
        """

    def close(self) -> None:
        """Remove all taps, so that everything is compiled without them."""


class InsideGraphs(Protocol):
    """Modules that are seen inside compiled graphs."""

    def compile(self, model: Any, options: Mapping[str, Any]) -> Any:
        """Return the compiled self of a model, with the framework's own options."""

    def graph_taps(self, kinds: frozenset[str], emulate_casts: bool) -> GraphTaps:
        """Return the object that places taps that record these kinds."""

    def memory_of(self, tensor: Any) -> Hashable:
        """Return the memory of the elements. Memory that was allocated anew differs while the earlier one is held."""


class Substitution(Protocol):
    """Other values in the place of a tensor, for checks that isolate each module."""

    def substitute(self, tensor: Any, values: npt.NDArray[np.generic], replacer: GradientReplacer) -> Any | None:
        """Return a new tensor with these values, and with the dtype, device, layout and graph position of `tensor`.

        The gradient that arrives at it goes through `replacer`. Return None for tensors that cannot be replaced.
        """

    def replace_gradient(self, tensor: Any, replacer: GradientReplacer) -> Remove | None:
        """Pass the gradient of this tensor, summed over all uses, through `replacer` before it propagates further.

        Return None if the tensor takes no part in autograd.
        """

    def is_differentiable(self, gradient: Any) -> bool:
        """Return whether a gradient may itself be differentiated, as in a backward with create_graph=True."""

    def overwrite(self, tensor: Any, values: Any) -> None:
        """Change a tensor in place to another one's values, as an operation that autograd records."""


class ExactExecution(Protocol):
    """Modules that run in float64, whatever dtypes their code asks for, without an effect on the model itself."""

    def exact_copy(self, module: Any) -> Any:
        """Return a copy in float64, without the hooks that observe the module. Raise if it cannot be copied."""

    def exact_value(self, value: Any) -> Any:
        """Return a copy of nested arguments, with floating-point tensors in float64. Raise if one cannot be copied."""

    def exactly(
        self, drew: Callable[[], None], autograd: bool = False, rounded: Callable[[str], None] | None = None
    ) -> AbstractContextManager[None]:
        """Return a block in which every operation computes in float64, without autocast and, unless asked, autograd.

        `drew` is called for every operation that draws random numbers. Their state is restored after the block.
        `rounded` is called with the name of each operation that runs in a shorter dtype because it has no kernel for
        float64. Without `rounded`, such an operation raises its error.
        """

    def exact_backward(self, starts: Sequence[tuple[Any, npt.NDArray[np.generic]]]) -> None:
        """Run backward from these tensors, each with the gradient beside it. Call it in the block of `exactly`."""


class Reruns(Protocol):
    """Repeated runs of one model from the same state, to measure noise."""

    def save_state(self, model: Any) -> Callable[[], None]:
        """Save parameters, buffers, gradients and random state; return a function that restores them bit for bit."""

    def run_backward(self, tensors: Sequence[Any]) -> None:
        """Run backward from these tensors: with gradient 1 from scalars, with fixed random gradients from others."""


class ValueWriting(Protocol):
    """Values that are written into parameters and buffers."""

    def fill(self, tensor: Any, values: npt.NDArray[np.generic], recast: bool = False) -> None:
        """Write values into a parameter or buffer, bit for bit and unseen by autograd.

        Dtype and device stay. `recast` changes the dtype to that of the values, where the framework can.
        """


class StateRegistration(Protocol):
    """The tensors that modules register."""

    def registered(self, module: Any) -> Iterator[tuple[str, Any, TensorRegistration]]:
        """Yield (name, tensor, registration) of the module's own tensors, parameters first."""


class ReplayedCalls(Protocol):
    """Recorded calls that run again."""

    def player(self) -> Player:
        """Return the player, which turns recorded values into tensors."""


class ProfilerSpans(Protocol):
    """Spans in the framework's own profiler."""

    def profiling(self) -> Profiling:
        """Return the profiler adapter, which opens spans and finds the graph nodes of a call."""


class TensorOwnership(Protocol):
    """Owners of tensors: the modules, optimizers and state dicts that hold them."""

    def ownership(self) -> Ownership:
        """Return the object that answers questions about owners."""


class CheckpointLoading(Protocol):
    """Checkpoints and optimizers that change a model."""

    def loading(self) -> Loading:
        """Return the object that watches loads and steps."""


class OperatorTraces(Protocol):
    """Operators below the modules."""

    def operator_tracer(self) -> OperatorTracer:
        """Return the tracer, which records the operators of a call."""


class TrainingDiscovery(Protocol):
    """Trained models that a program does not name."""

    def discovery(self) -> Discovery:
        """Return the object that reports outermost calls and optimizers."""


if TYPE_CHECKING:

    class CompleteFramework(
        Framework,
        GradientGraph,
        OptimizerSteps,
        DeviceTimeline,
        EagerExecution,
        Substitution,
        ExactExecution,
        Reruns,
        ValueWriting,
        StateRegistration,
        ReplayedCalls,
        ProfilerSpans,
        TensorOwnership,
        CheckpointLoading,
        TrainingDiscovery,
        Protocol,
    ):
        """A framework with every capability; only for type checks of implementations."""

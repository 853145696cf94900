"""The contract between capture and a framework, in small protocols.

Capture knows no framework. Modules, tensors, parameters and graph nodes are opaque to it: only their framework looks
inside. `Framework` is what capture needs of every framework. `capabilities.py` holds what single features need beyond
that, and `FrameworkBase` has neutral answers for a framework that lacks wrappers, compilers, devices or ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tensortap.core.arguments import OpaqueValue
from tensortap.core.host_copies import MemoryPinning
from tensortap.errors import UsageError
from tensortap.frameworks.device_reader import DeviceReader

__all__ = [
    "AfterCall",
    "Autograd",
    "BeforeCall",
    "Devices",
    "Framework",
    "FrameworkBase",
    "GradientCallback",
    "Hooks",
    "Identity",
    "Modules",
    "Process",
    "Remove",
    "Tensors",
    "require",
]

Remove = Callable[[], None]
"""Removes what was placed. A second call has no effect."""

BeforeCall = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
"""Called with args and kwargs before the module runs. May return others, which the module then receives instead."""

AfterCall = Callable[[Any], Any]
"""Called with the module's output, or with None if the module raised. May return a replacement for the output."""

GradientCallback = Callable[[Any], None]
"""Called with the gradient of one tensor, or with None if backward passes the tensor without a gradient for it."""


@dataclass(slots=True)  # not frozen: one is made for every sighting, and freezing doubles the time that takes
class Identity:
    """Identifies a tensor and its current values, to recognise a second sighting."""

    token: Hashable
    """Equal while memory, geometry and version are equal. Another tensor may reuse it once this one is freed."""
    alive: Callable[[], bool] = field(compare=False)
    """Returns whether the tensor that the token was made for still holds its memory."""


class Process(Protocol):
    """The process that trains, and its place among others."""

    name: str
    """The framework's name, as runs store it."""

    def environment(self) -> dict[str, Any]:
        """Return versions, devices, flags and seeds: everything in which two runs may differ before the first step."""

    def rank(self) -> int: ...

    def world(self) -> int: ...

    def compute_threads(self, model: Any) -> int:
        """Return how many CPU threads the model's own computation keeps busy."""

    def openmp(self) -> str | None:
        """Return the file of the OpenMP runtime whose threads compute, if there is one."""

    def notices(self) -> Sequence[str]:
        """Return what the run as a whole should report about the framework so far; usually nothing."""


class Modules(Protocol):
    """The structure of a model."""

    def is_module(self, value: Any) -> bool:
        """Return whether the value is a module of this framework."""

    def network(self, model: Any) -> Any:
        """Return the module to tap: the one inside a trainer-like object, otherwise the argument itself."""

    def children(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Return the direct children; a shared child appears under each of its names."""

    def own_class(self, module: Any) -> str:
        """Return the framework's own class of a module, also through inheritance; "" for a purely user-defined one."""

    def assigned_name(self, item: Any) -> str:
        """Return the name that the framework assigned to a module or parameter; "" if it assigns none."""

    def wrapped(self, module: Any) -> str | None:
        """Return the attribute of the wrapped child if this module is a wrapper (DDP, compile, FSDP, checkpoint)."""

    def compiled(self, module: Any) -> bool:
        """Return whether calling this module runs a compiled graph, inside which hooks do not run."""

    def callable(self, module: Any) -> bool:
        """Return whether the module computes anything itself; a list of modules does not."""

    def parameters(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Return the module's own parameters, without those of its children."""

    def parameters_of(self, modules: Sequence[Any]) -> Sequence[tuple[int, str, Any]]:
        """Return the parameters of many modules, each with the index of its module. Runs at the start of every step."""

    def buffers(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Return the module's own buffers, without those of its children."""

    def remarks(self, module: Any) -> str:
        """Return what a tap on this module inevitably changes or misses; usually nothing."""


class Hooks(Protocol):
    """Callbacks on modules and tensors."""

    def on_call(self, module: Any, before: BeforeCall, after: AfterCall) -> Remove:
        """Call back around every call, also one that raises. Copies of the module do not report."""

    def on_gradient(self, tensor: Any, seen: GradientCallback) -> Remove | None:
        """Call back when this tensor's gradient is known. Return None if the tensor takes no part in autograd."""

    def on_parameter_gradient(self, parameter: Any, seen: GradientCallback) -> Remove | None:
        """Call back with this backward's own gradient, not the accumulated one. Return None for a frozen parameter."""

    def hook_is_current(self, parameter: Any, remove: Remove) -> bool:
        """Return whether an earlier `on_parameter_gradient` still holds.

        The hook must be on this very parameter, and run after all other hooks. False if that is unknown.
        """

    def propagates_exceptions(self) -> bool:
        """Return whether an exception that the current hook raises reaches the caller unchanged."""


class Autograd(Protocol):
    """The state of automatic differentiation, and arithmetic on gradients."""

    def recomputing(self) -> bool:
        """Return whether the current forward is a recomputation during backward (activation checkpointing)."""

    def inside_function(self) -> bool:
        """Return whether the caller runs inside the forward of an autograd function, where autograd is off."""

    def records_gradients(self) -> bool:
        """Return whether autograd is on."""

    def requires_gradient(self, tensor: Any) -> bool: ...

    def version(self, tensor: Any) -> int:
        """Return the number of in-place changes so far; 0 if the framework does not count them."""

    def mark(self) -> int:
        """Return a point in the growth of the graph, which separates later nodes from earlier ones."""

    def add(self, left: Any, right: Any) -> Any:
        """Return the sum of two gradients as a new tensor."""

    def copy(self, tensor: Any) -> Any:
        """Return a detached copy in memory of its own."""


class Tensors(Protocol):
    """Tensors and their values."""

    def is_tensor(self, value: Any) -> bool: ...

    def opaque_value(self, value: Any) -> OpaqueValue | None:
        """Return the name of a dtype or a device; None for every other value."""

    def unreadable(self, tensor: Any) -> str:
        """Return why this tensor's elements cannot be read (meta, nested, vmapped, ...); "" if they can."""

    def identity(self, tensor: Any) -> Identity | None:
        """Return the identity, or None if the framework tracks no changes: every sighting is then read again."""

    def host(self, tensor: Any) -> npt.NDArray[np.generic]:
        """Return the elements as a NumPy array: a view of a tensor in host memory, not a copy.

        The caller reads or copies the array before the user's code continues and changes or frees that memory.
        """


class Devices(Protocol):
    """Tensors outside of host memory."""

    def device_reader(self, tensor: Any) -> DeviceReader | None:
        """Return what reads this tensor on its device; None if it is in host memory or must be copied there."""

    def pinning(self, model: Any) -> MemoryPinning | None:
        """Return what pins memory for copies from the model's device; None if the model is in host memory."""


class Framework(Process, Modules, Hooks, Autograd, Tensors, Devices, Protocol):
    """Everything that capture needs of a framework."""


class FrameworkBase:
    """Neutral implementations for a framework without ranks, wrappers, compiler, devices or change tracking.

    A subclass sets `name` and implements `is_module`, `children`, `parameters`, `on_call`, `is_tensor` and `host`. It
    overrides whatever else it can answer, and adds the methods of the `capabilities` that it supports.
    """

    name: str

    def environment(self) -> dict[str, Any]:
        return {}

    def rank(self) -> int:
        return 0

    def world(self) -> int:
        return 1

    def compute_threads(self, model: Any) -> int:
        return 1

    def openmp(self) -> str | None:
        return None

    def notices(self) -> Sequence[str]:
        return ()

    def is_module(self, value: Any) -> bool:
        raise NotImplementedError

    def network(self, model: Any) -> Any:
        return model

    def children(self, module: Any) -> Sequence[tuple[str, Any]]:
        raise NotImplementedError

    def own_class(self, module: Any) -> str:
        return ""

    def assigned_name(self, item: Any) -> str:
        return ""

    def wrapped(self, module: Any) -> str | None:
        return None

    def compiled(self, module: Any) -> bool:
        return False

    def callable(self, module: Any) -> bool:
        return True

    def parameters(self, module: Any) -> Sequence[tuple[str, Any]]:
        raise NotImplementedError

    def parameters_of(self, modules: Sequence[Any]) -> Sequence[tuple[int, str, Any]]:
        return [(index, *each) for index, module in enumerate(modules) for each in self.parameters(module)]

    def buffers(self, module: Any) -> Sequence[tuple[str, Any]]:
        return ()

    def remarks(self, module: Any) -> str:
        return ""

    def on_call(self, module: Any, before: BeforeCall, after: AfterCall) -> Remove:
        raise NotImplementedError

    def on_gradient(self, tensor: Any, seen: GradientCallback) -> Remove | None:
        return None

    def on_parameter_gradient(self, parameter: Any, seen: GradientCallback) -> Remove | None:
        return self.on_gradient(parameter, seen)

    def hook_is_current(self, parameter: Any, remove: Remove) -> bool:
        return False

    def propagates_exceptions(self) -> bool:
        return True

    def recomputing(self) -> bool:
        return False

    def inside_function(self) -> bool:
        return False

    def records_gradients(self) -> bool:
        return True

    def requires_gradient(self, tensor: Any) -> bool:
        return True

    def version(self, tensor: Any) -> int:
        return 0

    def mark(self) -> int:
        return 0

    def add(self, left: Any, right: Any) -> Any:
        return left + right

    def copy(self, tensor: Any) -> Any:
        return copy.deepcopy(tensor)

    def is_tensor(self, value: Any) -> bool:
        raise NotImplementedError

    def opaque_value(self, value: Any) -> OpaqueValue | None:
        return None

    def unreadable(self, tensor: Any) -> str:
        return ""

    def identity(self, tensor: Any) -> Identity | None:
        return None

    def host(self, tensor: Any) -> npt.NDArray[np.generic]:
        raise NotImplementedError

    def device_reader(self, tensor: Any) -> DeviceReader | None:
        return None

    def pinning(self, model: Any) -> MemoryPinning | None:
        return None


def require(framework: Process, capability: type, feature: str) -> Any:
    """Return the framework if it has all methods of the capability.

    Raise UsageError otherwise, with the framework's name, the feature and the missing methods.
    """
    missing = [name for name in _methods(capability) if not hasattr(framework, name)]
    if missing:
        raise UsageError(
            f"{feature} is not available for {framework.name}: its support lacks {', '.join(missing)} "
            f"({capability.__module__}.{capability.__qualname__})"
        )
    return framework


def _methods(capability: type) -> Iterator[str]:
    return (name for name in vars(capability) if not name.startswith("_"))

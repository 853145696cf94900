"""The contract between capture and a framework, in small protocols.

Capture knows no framework. Modules, tensors, parameters and graph nodes are opaque to it: only their framework looks
inside. `Framework` has the methods that capture needs of every framework. `capabilities.py` has the further needs of
single features. `FrameworkBase` has neutral answers for a framework that lacks wrappers, compilers, devices or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tensortap.core.arguments import OpaqueValue
from tensortap.core.host_copies import MemoryPinning
from tensortap.errors import UsageError
from tensortap.frameworks.device_reader import DeviceReader, TokenHold, VisibleSketches
from tensortap.frameworks.hooks import ModuleCalls, NativeHooks
from tensortap.frameworks.tensor_kind import TensorKind

__all__ = [
    "AfterCall",
    "Autograd",
    "BeforeCall",
    "Devices",
    "Framework",
    "GradientCallback",
    "Hooks",
    "HostMemory",
    "Identity",
    "ModelStructure",
    "Process",
    "Remove",
    "TensorValues",
    "require",
]

Remove = Callable[[], None]
"""Removes a hook. A second call has no effect."""

BeforeCall = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
"""Called with args and kwargs before the module runs. May return others, which the module then receives instead."""

AfterCall = Callable[[Any], Any]
"""Called with the module's output, or with None if the module raised. May return a replacement for the output."""

GradientCallback = Callable[[Any], None]
"""Called with the gradient of one tensor, or with None if backward passes the tensor without a gradient for it."""


HostMemory = tuple[TensorKind, int, Hashable | None]
"""A plain tensor in host memory, described by a tuple: its kind, its address, and a token. As with `Identity.token`,
the token is equal at two sightings of the same unchanged tensor.
"""


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
        """Return the number of CPU threads that the model's own computation keeps busy."""

    def openmp(self) -> str | None:
        """Return the file of the OpenMP runtime whose threads compute, if there is one."""

    def random_states(self) -> Iterable[tuple[str, bytes]]:
        """Yield the state of each of the framework's random generators, with a name like "torch.cpu"."""

    def notices(self) -> Sequence[str]:
        """Return remarks about the framework for the run as a whole; usually none."""


class ModelStructure(Protocol):
    """The structure of a model."""

    def is_module(self, value: Any) -> bool:
        """Return whether the value is a module of this framework."""

    def network(self, model: Any) -> Any:
        """Return the module to tap: the one inside a trainer-like object, otherwise the argument itself."""

    def join(self, models: Mapping[str, Any]) -> Any:
        """Return a module that has these as its children and is never called. Its `training` is true if any's is."""

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

    def uses_compiler(self) -> bool:
        """Return whether this process compiles code, which may be compiled again if modules get or lose hooks."""

    @property
    def children_attribute(self) -> str | None:
        """Attribute of modules that is a dictionary of their children, if that is all that `signature` depends on."""

    def signature(self, module: Any) -> Hashable:
        """Return a value that changes if children are added, removed or replaced. Runs for each container in a step."""

    def on_change(self, changed: Callable[[Any], None], wrapped: Callable[[Any], None]) -> Remove | None:
        """Call `changed` before any module of the process gets a child, and after it was compiled in place.

        Call `wrapped` with each compiled wrapper of a module: those that exist, and later ones after they were made.
        Both are methods; only weak references to them are kept. Return None if the framework reports nothing;
        `signature` then shows changes.
        """

    def callable(self, module: Any) -> bool:
        """Return whether the module computes anything itself; a list of modules does not."""

    def parameters(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Return the module's own parameters, without those of its children."""

    @property
    def parameters_attribute(self) -> str | None:
        """Attribute of modules that is a dictionary of their parameters; None if there is none."""

    @property
    def hooks_attribute(self) -> str | None:
        """Attribute of parameters that is None or a dictionary of their hooks by number; None if there is none."""

    def parameters_of(self, modules: Sequence[Any]) -> Sequence[tuple[int, str, Any]]:
        """Return the parameters of many modules, each with the index of its module. Runs at the start of every step."""

    def buffers(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Return the module's own buffers, without those of its children."""

    def internal_attributes(self) -> Collection[str]:
        """Return the attributes that the framework gives every module, and that say nothing about the module itself."""

    def remarks(self, module: Any) -> str:
        """Return remarks on what a tap on this module inevitably changes or misses; usually none."""


class Hooks(Protocol):
    """Callbacks on modules and tensors."""

    def on_call(self, module: Any, before: BeforeCall, after: AfterCall) -> Remove:
        """Call back around every call, also one that raises. Copies of the module do not report."""

    @property
    def native_hooks(self) -> NativeHooks | None:
        """The objects with which the C code runs the hooks of `on_call`; None if only Python can run them."""

    @property
    def module_calls(self) -> ModuleCalls | None:
        """The functions with which the C code runs whole calls of modules; None if only Python can run them."""

    def on_gradient(self, tensor: Any, seen: GradientCallback) -> Remove | None:
        """Call back when this tensor's gradient is known. Return None if the tensor takes no part in autograd."""

    def on_parameter_gradient(self, parameter: Any, seen: GradientCallback) -> Remove | None:
        """Call back with this backward's own gradient, not the accumulated one. Return None for a frozen parameter."""

    def replaces_parameter(self, parameter: Any) -> bool:
        """Return whether each forward replaces this parameter by another tensor, as FSDP1 does."""

    def hook_is_current(self, parameter: Any, remove: Remove) -> bool:
        """Return whether an earlier `on_parameter_gradient` still holds.

        The hook must be on this very parameter, and run after all other hooks. False if that is unknown.
        """

    def propagates_exceptions(self) -> bool:
        """Return whether an exception that the current hook raises reaches the caller unchanged."""


class Autograd(Protocol):
    """The state of automatic differentiation, and arithmetic on gradients."""

    def tracing(self) -> bool:
        """Return whether the current forward computes no values, because it is traced or its tensors are fake."""

    def is_fitting(self, model: Any) -> bool:
        """Return whether a trainer that the model knows is training it now; False if that is unknown."""

    def recomputing(self) -> bool:
        """Return whether the current forward is a recomputation during backward (activation checkpointing)."""

    def inside_function(self) -> bool:
        """Return whether the caller runs inside the forward of an autograd function, where autograd is off."""

    def records_gradients(self) -> bool:
        """Return whether autograd is on."""

    def requires_gradient(self, tensor: Any) -> bool: ...

    def require_gradients(self, tensors: Sequence[Any]) -> list[bool]:
        """Return `requires_gradient` of each tensor."""

    def versions(self, tensors: Sequence[Any]) -> dict[int, int]:
        """Return the `version` of each tensor, by its id."""

    def version(self, tensor: Any) -> int:
        """Return the number of in-place changes so far; 0 if the framework does not count them."""

    def mark(self) -> int:
        """Return a point in the growth of the graph, which separates later nodes from earlier ones."""

    def add(self, left: Any, right: Any) -> Any:
        """Return the sum of two gradients as a new tensor."""

    def copy(self, tensor: Any) -> Any:
        """Return a detached copy in memory of its own."""


class TensorValues(Protocol):
    """Tensors and their values."""

    def is_tensor(self, value: Any) -> bool: ...

    def opaque_value(self, value: Any) -> OpaqueValue | None:
        """Return the name of a dtype or a device; None for every other value."""

    def unreadable(self, tensor: Any) -> str:
        """Return why this tensor's elements cannot be read (meta, nested, vmapped, ...); "" if they can."""

    def identity(self, tensor: Any) -> Identity | None:
        """Return the identity, or None if the framework tracks no changes: every sighting is then read again."""

    def local_shape(self, tensor: Any) -> tuple[int, ...]:
        """Return the shape of the part of a tensor that this process holds."""

    def host(self, tensor: Any) -> npt.NDArray[np.generic]:
        """Return the elements as a NumPy array: a view of a tensor in host memory, not a copy.

        The caller reads or copies the array before the user's code continues and changes or frees that memory.
        """

    @property
    def tensor_exchange(self) -> Any | None:
        """The exchange interface of DLPack for plain tensors, in a capsule; None if there is none."""

    def tensor_access(self) -> tuple[Any | None, bool]:
        """Return the framework's own answers about plain tensors, for the C code: `native`'s TensorAccess in a capsule.

        It is None if there are none, or none yet: the flag says whether they may still come.
        """

    @property
    def plain_tensors(self) -> Collection[type]:
        """Classes of tensors without behaviour of their own, which need no `is_tensor`. May be empty."""

    def host_memory(self, tensor: Any, likely: TensorKind | None = None) -> HostMemory | None:
        """Return the memory of a plain, readable tensor on the host whose elements are one after the other.

        Return None for every other tensor, and for one without elements: `unreadable`, `identity` and `host` answer for
        it. This runs first for every tensor, so it does little. `likely` is the kind of the tensor in the same place in
        the step before.
        """

    def gathered(self, tensor: Any, most: int) -> tuple[Any, HostMemory] | None:
        """Variant of `host_memory` for a tensor of at most `most` bytes whose elements are not neighbours.

        The elements are gathered in an array. It is returned as well, since it must exist while they are read there.
        """

    def hold_tokens(self) -> TokenHold:
        """Return a new, empty hold on the tokens that `host_memory` returns."""


class Devices(Protocol):
    """Tensors outside of host memory."""

    def device_reader(self, tensor: Any) -> DeviceReader | None:
        """Return the reader of this tensor's device; None if the tensor is in host memory or must be copied there."""

    def pinning(self, model: Any) -> MemoryPinning | None:
        """Return the function that pins memory for copies from the model's device; None for a model in host memory."""

    def visible_sketches(self) -> VisibleSketches | None:
        """Return the object that sketches tensors on a device without hidden positions; None if there is none."""


class Framework(Process, ModelStructure, Hooks, Autograd, TensorValues, Devices, Protocol):
    """All methods that capture needs of a framework."""


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

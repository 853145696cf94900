"""Neutral implementations of `base.Framework`, for frameworks that lack parts of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core.arguments import OpaqueValue
from tensortap.core.host_copies import MemoryPinning
from tensortap.errors import UsageError
from tensortap.frameworks.base import AfterCall, BeforeCall, GradientCallback, HostMemory, Identity, Remove
from tensortap.frameworks.capabilities import DeviceMark
from tensortap.frameworks.device_reader import DeviceReader, TokenHold, VisibleSketches
from tensortap.frameworks.hooks import ModuleCalls, NativeHooks
from tensortap.frameworks.tensor_kind import TensorKind

__all__ = ["FrameworkBase"]


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

    def random_states(self) -> Iterable[tuple[str, bytes]]:
        return ()

    def notices(self) -> Sequence[str]:
        return ()

    def is_module(self, value: Any) -> bool:
        raise NotImplementedError

    def network(self, model: Any) -> Any:
        return model

    def join(self, models: Mapping[str, Any]) -> Any:
        raise UsageError(f"several models in one tap are not available for {self.name}: tap each on its own")

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

    def uses_compiler(self) -> bool:
        return True

    def signature(self, module: Any) -> Hashable:
        return tuple(id(child) for _, child in self.children(module))

    def on_change(self, changed: Callable[[Any], None], wrapped: Callable[[Any], None]) -> Remove | None:
        return None

    def callable(self, module: Any) -> bool:
        return True

    def parameters(self, module: Any) -> Sequence[tuple[str, Any]]:
        raise NotImplementedError

    def parameters_of(self, modules: Sequence[Any]) -> Sequence[tuple[int, str, Any]]:
        return [(index, *each) for index, module in enumerate(modules) for each in self.parameters(module)]

    def buffers(self, module: Any) -> Sequence[tuple[str, Any]]:
        return ()

    def internal_attributes(self) -> Collection[str]:
        return ()

    def remarks(self, module: Any) -> str:
        return ""

    def on_call(self, module: Any, before: BeforeCall, after: AfterCall) -> Remove:
        raise NotImplementedError

    def on_gradient(self, tensor: Any, seen: GradientCallback) -> Remove | None:
        return None

    def on_parameter_gradient(self, parameter: Any, seen: GradientCallback) -> Remove | None:
        return self.on_gradient(parameter, seen)

    def replaces_parameter(self, parameter: Any) -> bool:
        return False

    def hook_is_current(self, parameter: Any, remove: Remove) -> bool:
        return False

    def propagates_exceptions(self) -> bool:
        return True

    def tracing(self) -> bool:
        return False

    def is_fitting(self, model: Any) -> bool:
        return False

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

    def local_shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def host(self, tensor: Any) -> npt.NDArray[np.generic]:
        raise NotImplementedError

    def require_gradients(self, tensors: Sequence[Any]) -> list[bool]:
        return [self.requires_gradient(tensor) for tensor in tensors]

    def versions(self, tensors: Sequence[Any]) -> dict[int, int]:
        return {id(tensor): self.version(tensor) for tensor in tensors}

    plain_tensors: Collection[type] = frozenset()
    tensor_exchange: Any | None = None
    children_attribute: str | None = None
    parameters_attribute: str | None = None
    hooks_attribute: str | None = None

    def tensor_access(self) -> tuple[Any | None, bool]:
        return None, False

    @property
    def native_hooks(self) -> NativeHooks | None:
        return None

    @property
    def module_calls(self) -> ModuleCalls | None:
        return None

    def host_memory(self, tensor: Any, likely: TensorKind | None = None) -> HostMemory | None:
        return None

    def gathered(self, tensor: Any, most: int) -> tuple[Any, HostMemory] | None:
        return None

    def hold_tokens(self) -> TokenHold:
        return _NoTokens()

    def device_reader(self, tensor: Any) -> DeviceReader | None:
        return None

    def pinning(self, model: Any) -> MemoryPinning | None:
        return None

    def visible_sketches(self) -> VisibleSketches | None:
        return None

    def device_mark(self, model: Any) -> DeviceMark | None:
        return None


class _NoTokens:
    """The hold of a framework that has no tokens."""

    def add(self, tensor: Any) -> None:
        raise NotImplementedError

    def clear(self) -> None:
        pass

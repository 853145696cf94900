"""The tensors that a module registers: parameters and buffers, as the framework itself lists them.

Paddle registers a BatchNorm's running mean and variance as parameters that no optimizer trains. Users see them in
`parameters()`, so they are parameters here. `TensorRegistration.statistics` marks that they have the role of buffers,
as which captures record them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import StateRegistration

__all__ = ["TensorRegistration", "list_registered", "registered"]


@dataclass(frozen=True, slots=True)
class TensorRegistration:
    """The registration of one tensor by a module."""

    kind: str
    """parameter | buffer | non-persistent buffer"""
    statistics: bool = False
    """A parameter that holds running statistics: a forward updates it, no optimizer does."""

    @property
    def parameter(self) -> bool:
        return self.kind == "parameter"

    @property
    def saved(self) -> bool:
        """Whether the framework's own `state_dict()` holds it."""
        return self.kind != "non-persistent buffer"

    @property
    def trained(self) -> bool:
        """Whether an optimizer changes its values, rather than a forward."""
        return self.parameter and not self.statistics


def registered(framework: Framework, module: Any) -> Iterator[tuple[str, Any, TensorRegistration]]:
    """Yield (name, tensor, registration) of the module's own tensors, parameters first."""
    supported: StateRegistration = require(framework, StateRegistration, "listing what a module registers")
    return supported.registered(module)


def list_registered(framework: Framework, module: Any, unsaved: str) -> Iterator[tuple[str, Any, TensorRegistration]]:
    """Implement `registered` for modules that keep dicts `_parameters` and `_buffers`.

    `unsaved` is the attribute that holds the names of the buffers that are not saved.
    """
    role_of_buffer = {name for name, _ in framework.buffers(module)}
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield name, tensor, TensorRegistration("parameter", statistics=name in role_of_buffer)
    names = getattr(module, unsaved, None) or ()
    for name, tensor in module._buffers.items():
        if tensor is not None:
            yield name, tensor, TensorRegistration("non-persistent buffer" if name in names else "buffer")

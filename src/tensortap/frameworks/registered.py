"""What a module registers: its parameters and buffers, as the framework itself lists them.

Paddle registers a BatchNorm's running mean and variance as parameters that no optimizer trains. Users see them in
`parameters()`, so they are parameters here. `Registration.statistics` says that they play the role of buffers, which is
what captures record them as.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensortap.frameworks.base import Framework

__all__ = ["Registration", "registered"]

_NON_PERSISTENT = ("_non_persistent_buffers_set", "_non_persistable_buffer_names_set")
"""Where torch and paddle keep the names of the buffers that a module does not save."""


@dataclass(frozen=True, slots=True)
class Registration:
    """How a module registers one tensor."""

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
        """Whether its values are an optimizer's to change, and not a forward's."""
        return self.parameter and not self.statistics


def registered(framework: Framework, module: Any) -> Iterator[tuple[str, Any, Registration]]:
    """Yield (name, tensor, registration) of the module's own tensors, parameters first; not its children's."""
    role_of_buffer = {name for name, _ in framework.buffers(module)}
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield name, tensor, Registration("parameter", statistics=name in role_of_buffer)
    unsaved = next(filter(None, (getattr(module, name, None) for name in _NON_PERSISTENT)), ())
    for name, tensor in module._buffers.items():
        if tensor is not None:
            yield name, tensor, Registration("non-persistent buffer" if name in unsaved else "buffer")

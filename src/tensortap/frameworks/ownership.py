"""Owners of a tensor: the module, the optimizer, the state_dict or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensortap.frameworks.base import Framework, Remove, require
from tensortap.frameworks.capabilities import TensorOwnership
from tensortap.frameworks.hooks import Detour
from tensortap.frameworks.registry import framework_of

__all__ = ["Ownership", "ownership_of"]


class Ownership:
    """The answers of one framework, and the words that its users know."""

    clearing: str
    """The call that clears gradients."""
    cleared: str
    """The state of a gradient after that call, by default: none or zero."""
    clearing_choices: str
    """A sentence about the result of the call, by default and with its other option, without a period."""
    clears_on_model: tuple[str, ...]
    """Methods of a module that clear gradients."""
    clears_on_optimizer: tuple[str, ...]
    module_list: str
    """The class that registers a list of modules."""
    module_dict: str
    parameter_containers: str
    """The classes that register several parameters."""
    freezing: str
    """The code that freezes a parameter."""
    module_class: type

    def __init__(self, framework: Framework) -> None:
        self.framework = framework

    def is_module(self, value: Any) -> bool:
        return isinstance(value, self.module_class)

    def attributes(self, module: Any) -> list[tuple[str, Any]]:
        """Return the entries of the module's `__dict__`, without the framework's own bookkeeping."""
        return [(name, value) for name, value in vars(module).items() if name not in self.bookkeeping]

    @property
    def bookkeeping(self) -> frozenset[str]:
        raise NotImplementedError

    def saved(self, model: Any) -> dict[str, Any]:
        """Return every key of the state_dict with the tensor object behind it."""
        return {
            key: tensor
            for key, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(key, str) and self.framework.is_tensor(tensor)
        }

    def groups(self, optimizer: Any) -> list[list[Any]]:
        """Return the tensors of each parameter group."""
        raise NotImplementedError

    def described(self, tensor: Any) -> tuple[str, tuple[int, ...] | None, int, str]:
        """Return dtype, shape (None if unknown before the first forward), bytes of one element, and device."""
        raise NotImplementedError

    def initialised(self, tensor: Any) -> bool:
        raise NotImplementedError

    def is_parameter(self, tensor: Any) -> bool:
        raise NotImplementedError

    def storage(self, tensor: Any) -> int | None:
        """Return a number that is equal for tensors on the same memory; None if a tensor has none."""
        raise NotImplementedError

    def gradient(self, tensor: Any) -> str:
        """Return none, zero or set."""
        raise NotImplementedError

    def around_step(self, optimizer: Any, before: Callable[[bool], None], after: Callable[[], None]) -> Remove:
        """Call back around each step. `before` gets whether a closure will run backward inside the step."""
        raise NotImplementedError

    def on_clearing(self, owner: Any, methods: Sequence[str], cleared: Callable[[str], None]) -> Remove:
        """Call back after each call of a method that clears gradients. Frameworks have no hook for it."""

        def around(name: str) -> Callable[..., Any]:
            def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                result = inner(*args, **kwargs)
                cleared(name)
                return result

            return call

        detours = [Detour(owner, name, around(name)) for name in methods if hasattr(owner, name)]

        def remove() -> None:
            for detour in detours:
                detour.remove()

        return remove


def ownership_of(model: Any) -> Ownership:
    """Return the answers of the framework that built the model."""
    supported: TensorOwnership = require(framework_of(model), TensorOwnership, "inspecting a model's tensors")
    return supported.ownership()

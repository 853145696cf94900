"""Loads into paddle layers, and steps of paddle optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks.base import Remove
from tensortap.frameworks.loading import Loading
from tensortap.frameworks.paddle.optimizers import parameter_groups, stepper

__all__ = ["PaddleLoading"]


class PaddleLoading(Loading):
    """Loads and steps of paddle."""

    loaders = ("set_state_dict", "set_dict", "load_dict")
    option_names = ("use_structured_name",)

    def by_tensor_name(self, options: Mapping[str, Any]) -> bool:
        return options.get("use_structured_name") is False

    def groups(self, optimizer: Any) -> Any:
        try:
            return parameter_groups(optimizer)
        except UsageError:  # one that was written by hand
            return getattr(optimizer, "_param_groups", None) or ()

    def in_host_memory(self, tensor: Any) -> bool:
        return bool(tensor.place.is_cpu_place())

    def around_steps(self, optimizer: Any, before: Callable[[], None], after: Callable[[], None]) -> Remove:
        return super().around_steps(stepper(optimizer) or optimizer, before, after)

"""Loads into torch modules, and steps of torch optimizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tensortap.frameworks.base import Remove
from tensortap.frameworks.hooks import innermost_optimizer
from tensortap.frameworks.loading import Loading
from tensortap.frameworks.torch.steps import after_step, before_step

__all__ = ["TorchLoading"]


class TorchLoading(Loading):
    """Loads and steps of torch."""

    loaders = ("load_state_dict",)
    option_names = ("strict", "assign")

    def groups(self, optimizer: Any) -> Any:
        return getattr(optimizer, "param_groups", None) or ()

    def in_host_memory(self, tensor: Any) -> bool:
        return bool(tensor.device.type == "cpu")

    def around_steps(self, optimizer: Any, before: Callable[[], None], after: Callable[[], None]) -> Remove:
        # A wrapper does more than the optimizer inside it: it may copy master weights back.
        if not hasattr(optimizer, "register_step_pre_hook") or innermost_optimizer(optimizer) is not optimizer:
            return super().around_steps(optimizer, before, after)
        with ExitStack() as undo:
            undo.callback(before_step(optimizer, lambda *_: before()))
            undo.callback(after_step(optimizer, after))
            return undo.pop_all().close

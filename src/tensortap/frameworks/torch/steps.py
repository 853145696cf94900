"""Steps of a torch optimizer.

Torch runs the hooks of a step in a wrapper around `step()`, and wraps the method of each class that was ever
instantiated. A subclass that calls `super().step()` therefore runs all hooks twice or once, depending on which other
optimizers the process has made. Here a step counts once, and ends with the outermost call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from tensortap.frameworks.base import Remove

__all__ = ["after_step", "before_step"]

_TORCH_FILE = torch.optim.Optimizer.__init__.__code__.co_filename
"""The file that defines the wrapper. Torch hides the module `torch.optim.optimizer` itself."""


def before_step(optimizer: Any, action: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Remove:
    """Call `action` with the arguments of each step before it begins. It may return others, which the step gets."""

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return action(args, kwargs) if _depth(optimizer) <= 1 else None

    return optimizer.register_step_pre_hook(hook).remove  # type: ignore[no-any-return]


def after_step(optimizer: Any, action: Callable[[], None]) -> Remove:
    """Call `action` after each step."""

    def hook(*_: Any) -> None:
        if _depth(optimizer) <= 1:
            action()

    return optimizer.register_step_post_hook(hook).remove  # type: ignore[no-any-return]


def _depth(optimizer: Any) -> int:
    """Return the number of wrappers around steps of this optimizer that run. The stack is right even after a step has
    raised.
    """
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _TORCH_FILE:
            depth += frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return depth

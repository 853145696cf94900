"""Models and optimizers of a torch program."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensortap.frameworks.base import Remove
from tensortap.frameworks.discovery import Discovery, OutermostCalls
from tensortap.frameworks.hooks import Detour

__all__ = ["TorchDiscovery"]


class TorchDiscovery(Discovery):
    """Calls of `torch.nn.Module`, and `torch.optim.Optimizer`."""

    module_class = torch.nn.Module
    # `torch.compile` keeps `__call__` of its module and would compile a replacement of it.
    calling = "_call_impl"
    optimizer_classes = (torch.optim.Optimizer,)

    def is_call(self, frame: FrameType) -> bool:
        return frame.f_code is torch.nn.Module._wrapped_call_impl.__code__  # a compiler looks the method up, too

    def is_complete(self, optimizer: Any) -> bool:
        return "param_groups" in vars(optimizer)

    def on_step(self, seen: Callable[[Any], None]) -> Remove:
        def hook(optimizer: Any, *_: Any) -> None:
            seen(optimizer)

        return register_optimizer_step_pre_hook(hook).remove  # type: ignore[no-any-return]

    def watch_compiled(self, calls: OutermostCalls) -> Remove:
        compile_in_place = torch.nn.Module.compile
        detours: list[Detour] = []

        def watch(module: Any) -> None:
            def around(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                detour.remove()
                detours.remove(detour)
                with calls.entered(module):
                    try:
                        return module._compiled_call_impl(*args, **kwargs)  # through the hooks of a new tap, too
                    finally:
                        if calls.searching:
                            watch(module)

            detour = Detour(module, "_compiled_call_impl", around)
            detours.append(detour)

        @wraps(compile_in_place)
        def compile_module(module: Any, *args: Any, **kwargs: Any) -> None:
            calls.restore()  # the compiler keeps the method that it finds
            try:
                compile_in_place(module, *args, **kwargs)
            finally:
                calls.place()
            watch(module)

        torch.nn.Module.compile = compile_module

        def remove() -> None:
            torch.nn.Module.compile = compile_in_place
            for detour in detours:
                detour.remove()

        return remove

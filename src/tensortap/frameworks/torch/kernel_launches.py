"""Notices launches of Triton kernels, which bypass torch's dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

__all__ = ["KernelLaunches"]

_RUNNERS = (("jit", "JITFunction"), ("autotuner", "Autotuner"), ("autotuner", "Heuristics"))
"""Modules of `triton.runtime` and their classes whose `run` launches a kernel; an autotuner runs one many times."""

Launched = Callable[[Callable[[], Any], str, Any, Any], Any]
"""Called instead of a launch, with the launching function, the kernel's name, its arguments and the frame that launches
it.
"""


class KernelLaunches:
    """Shows launches between `place` and `remove`. Without Triton in the process, there is nothing to do."""

    def __init__(self, launched: Launched) -> None:
        self._launched = launched
        self._placed: list[tuple[Any, Any]] = []

    def place(self) -> None:
        if "triton" not in sys.modules or self._placed:
            return
        for module, name in _RUNNERS:
            runner = getattr(sys.modules.get(f"triton.runtime.{module}"), name, None)
            if runner is not None and "run" in vars(runner):
                self._placed.append((runner, runner.run))
                runner.run = self._showing(runner.run)

    def remove(self) -> None:
        while self._placed:
            runner, own = self._placed.pop()
            runner.run = own

    def _showing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        launched = self._launched

        @wraps(own)
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            launch = partial(own, kernel, *args, **kwargs)
            return launched(launch, kernel_name(kernel), (args, kwargs), sys._getframe(1))

        return run


def kernel_name(kernel: Any) -> str:
    """Return the name of the function that a kernel was made from, through tuners around it."""
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", type(kernel).__name__))

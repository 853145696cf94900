"""Spans in paddle's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import paddle
import paddle.profiler

from tensortap.frameworks.profiling import Profiling

__all__ = ["PaddleProfiling"]


class PaddleProfiling(Profiling):
    """Spans of paddle.profiler."""

    by_node = False  # there is no hook before a node, and one after it is never freed

    def recording(self) -> bool:
        return bool(paddle.profiler.utils.in_profiler_mode())

    def idle_module(self) -> Any | None:
        class TensortapIdle(paddle.nn.Layer):  # type: ignore[misc]
            def forward(self) -> None: ...

        return TensortapIdle()

    def begin(self, name: str, light: bool = False) -> Any:
        record = paddle.profiler.RecordEvent(name)
        record.begin()
        return record

    def end(self, span: Any) -> None:
        span.end()

    def anchors(self, inputs: Iterable[Any]) -> list[Any]:
        # A leaf outlives its graph, and hooks on it would pile up.
        return [tensor for tensor in inputs if not tensor.stop_gradient and not tensor.is_leaf]

    def at_backward_end(self, callback: Callable[[], None]) -> bool:
        add = getattr(paddle.base.core.eager, "_add_backward_final_hook", None)
        if add is None:
            return False
        add(callback)
        return True

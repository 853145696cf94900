"""Spans in torch's profiler, and the nodes of torch's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from tensortap.frameworks.base import Framework, Remove
from tensortap.frameworks.profiling import CallNode, Profiling

__all__ = ["TorchProfiling"]

_ACCUMULATES = 2**63
"""torch numbers the nodes that add into .grad beyond any other. They belong to no call."""


class TorchProfiling(Profiling):
    """Spans of torch.profiler and NVTX."""

    by_node = True

    def __init__(self, framework: Framework) -> None:
        super().__init__(framework)
        self._fast = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)

    def mark(self, name: str) -> AbstractContextManager[Any]:
        # It takes a tenth of the time of record_function.
        return self._fast(name) if self._fast is not None else self._span(name)

    def recording(self) -> bool:
        return bool(torch.autograd._profiler_enabled())

    def idle_module(self) -> Any | None:
        class Idle(torch.nn.Module):  # type: ignore[misc]
            def forward(self) -> None: ...

        # A user's global hooks expect the modules of the model.
        return None if torch.nn.modules.module._has_any_global_hook() else Idle()

    def begin(self, name: str, light: bool = False) -> Any:
        record = self._fast(name) if light and self._fast is not None else torch.profiler.record_function(name)
        record.__enter__()
        # Profilers that attach from outside see NVTX ranges; emit_nvtx makes those of every record_function itself.
        marked = torch.cuda.is_initialized() and not self._emits_nvtx()
        if marked:
            torch.cuda.nvtx.range_push(name)
        return record, marked

    def end(self, span: Any) -> None:
        record, marked = span
        if marked:
            torch.cuda.nvtx.range_pop()
        record.__exit__(None, None, None)

    def _emits_nvtx(self) -> bool:
        kind = getattr(torch._C._autograd, "_profiler_type", None)
        return kind is not None and kind().name == "NVTX"

    def anchors(self, inputs: Iterable[Any]) -> list[Any]:
        return [tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None]

    def nodes(self, outputs: Iterable[Any], anchors: Sequence[Any], mark: int) -> list[CallNode]:
        waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        stops, visited = set(anchors), set(waiting)
        found = []
        while waiting:
            node = waiting.pop()
            # Nodes are numbered by the thread that makes them; `stops` holds where another thread made the inputs.
            if node in stops or not mark <= node._sequence_nr() < _ACCUMULATES:
                continue
            last = False
            for after, _ in node.next_functions:
                if after is None:
                    continue
                last = last or after in stops or not mark <= after._sequence_nr() < _ACCUMULATES
                if after not in visited:
                    visited.add(after)
                    waiting.append(after)
            found.append(CallNode(node, last))
        return found

    def around_node(self, node: Any, before: Callable[[], None], after: Callable[[], None]) -> Sequence[Remove]:
        def entered(_: Any) -> None:
            before()

        def left(*_: Any) -> None:
            after()

        return node.register_prehook(entered).remove, node.register_hook(left).remove

    def at_backward_end(self, callback: Callable[[], None]) -> bool:
        if not self.framework.recomputing():
            return False
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        return True

"""Spans in the frameworks' own profilers, and the graph nodes that a call has made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from tensortap.frameworks.base import Framework, Remove

__all__ = ["Node", "PaddleProfiling", "Profiling", "TorchProfiling", "profiling_of"]

_ACCUMULATES = 2**63
"""torch numbers the nodes that add into .grad beyond any other; they belong to no call."""


@dataclass(frozen=True, slots=True)
class Node:
    """A graph node that one call has made."""

    node: Any
    last: bool
    """It sends gradient out of the call: to an input or a parameter."""


class Profiling:
    """What `annotate` asks of a framework's profiler."""

    by_node: bool
    """Whether graph nodes can be watched; else only the gradients of tensors."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework

    def begin(self, name: str, light: bool = False) -> Any:
        """Open a span on this thread. A light one costs less and has no range on the device's lane."""
        raise NotImplementedError

    def end(self, span: Any) -> None:
        raise NotImplementedError

    def instant(self, name: str) -> None:
        self.end(self.begin(name))

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """A span of our own work, as cheap as the framework offers it."""
        return self._span(name)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        span = self.begin(name)
        try:
            yield
        finally:
            self.end(span)

    def recording(self) -> bool:
        """Whether a profiler of the framework records right now."""
        raise NotImplementedError

    def idle_module(self) -> Any | None:
        """A module whose forward does nothing; None if calling one would have side effects."""
        raise NotImplementedError

    def anchors(self, inputs: Iterable[Any]) -> list[Any]:
        """Where the graph of these tensors stands before a call: nodes, or tensors where nodes cannot be watched."""
        raise NotImplementedError

    def nodes(self, outputs: Iterable[Any], anchors: Sequence[Any], mark: int) -> list[Node]:
        """The nodes between `outputs` and the anchors of the inputs that were made since `mark`."""
        raise NotImplementedError

    def around_node(self, node: Any, before: Callable[[], None], after: Callable[[], None]) -> Sequence[Remove]:
        raise NotImplementedError

    def at_backward_end(self, callback: Callable[[], None]) -> bool:
        """Call back once when the backward that runs now is over; False if that cannot be had."""
        raise NotImplementedError


class TorchProfiling(Profiling):
    by_node = True

    def __init__(self, framework: Framework) -> None:
        super().__init__(framework)
        import torch

        self._torch = torch
        self._fast = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)

    def mark(self, name: str) -> AbstractContextManager[Any]:
        # It takes a tenth of the time of record_function.
        return self._fast(name) if self._fast is not None else self._span(name)

    def recording(self) -> bool:
        return bool(self._torch.autograd._profiler_enabled())

    def idle_module(self) -> Any | None:
        class Idle(self._torch.nn.Module):  # type: ignore[misc,name-defined]
            def forward(self) -> None: ...

        # A user's global hooks expect the modules of the model.
        return None if self._torch.nn.modules.module._has_any_global_hook() else Idle()

    def begin(self, name: str, light: bool = False) -> Any:
        record = self._fast(name) if light and self._fast is not None else self._torch.profiler.record_function(name)
        record.__enter__()
        # Profilers that attach from outside see NVTX ranges; emit_nvtx makes those of every record_function itself.
        marked = self._torch.cuda.is_initialized() and not self._emits_nvtx()
        if marked:
            self._torch.cuda.nvtx.range_push(name)
        return record, marked

    def end(self, span: Any) -> None:
        record, marked = span
        if marked:
            self._torch.cuda.nvtx.range_pop()
        record.__exit__(None, None, None)

    def _emits_nvtx(self) -> bool:
        kind = getattr(self._torch._C._autograd, "_profiler_type", None)
        return kind is not None and kind().name == "NVTX"

    def anchors(self, inputs: Iterable[Any]) -> list[Any]:
        return [tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None]

    def nodes(self, outputs: Iterable[Any], anchors: Sequence[Any], mark: int) -> list[Node]:
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
            found.append(Node(node, last))
        return found

    def around_node(self, node: Any, before: Callable[[], None], after: Callable[[], None]) -> Sequence[Remove]:
        def entered(_: Any) -> None:
            before()

        def left(*_: Any) -> None:
            after()

        return node.register_prehook(entered).remove, node.register_hook(left).remove

    def at_backward_end(self, callback: Callable[[], None]) -> bool:
        if not self.framework.replaying():
            return False
        self._torch.autograd.Variable._execution_engine.queue_callback(callback)
        return True


class PaddleProfiling(Profiling):
    by_node = False  # there is no hook before a node, and one after it is never freed

    def __init__(self, framework: Framework) -> None:
        super().__init__(framework)
        import paddle
        import paddle.profiler

        self._paddle = paddle

    def recording(self) -> bool:
        return bool(self._paddle.profiler.utils.in_profiler_mode())

    def idle_module(self) -> Any | None:
        class TensortapIdle(self._paddle.nn.Layer):  # type: ignore[misc,name-defined]
            def forward(self) -> None: ...

        return TensortapIdle()

    def begin(self, name: str, light: bool = False) -> Any:
        record = self._paddle.profiler.RecordEvent(name)
        record.begin()
        return record

    def end(self, span: Any) -> None:
        span.end()

    def anchors(self, inputs: Iterable[Any]) -> list[Any]:
        # A leaf outlives its graph, and hooks on it would pile up.
        return [tensor for tensor in inputs if not tensor.stop_gradient and not tensor.is_leaf]

    def at_backward_end(self, callback: Callable[[], None]) -> bool:
        add = getattr(self._paddle.base.core.eager, "_add_backward_final_hook", None)
        if add is None:
            return False
        add(callback)
        return True


def profiling_of(framework: Framework) -> Profiling:
    return TorchProfiling(framework) if framework.name == "torch" else PaddleProfiling(framework)

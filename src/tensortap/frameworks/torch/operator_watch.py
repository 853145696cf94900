"""Shows the operators of a model that trains, one by one, without holding their values and without a change to them.

The watch is a dispatch mode that is active in the forward of chosen modules alone. Backward runs without it, because
torch takes other paths under a mode; gradients are read by hooks on the graph's nodes.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from tensortap.core.operators import SourceLine
from tensortap.frameworks.base import Remove
from tensortap.frameworks.operators import Guard, OperatorRan, Sent
from tensortap.frameworks.torch.kernel_launches import KernelLaunches
from tensortap.frameworks.torch.operators import changed_arguments, is_uninitialised
from tensortap.frameworks.torch.source_lines import CallingCode, calling_code

__all__ = ["TorchOperatorWatch"]

_HIDDEN_VIEWS = frozenset(["_unsafe_view", "lift_fresh", "detach", "alias", "_reshape_alias"])
"""Operators that return their input's memory, though not all of them say so."""


@dataclass(slots=True)
class _FunctionCall:
    """An autograd Function that is running, or has just ended."""

    name: str
    line: SourceLine | None
    invocation: int
    made: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """The tensors that its code has made so far; the tensors that it returns are alive when it has ended."""


@dataclass(frozen=True, slots=True)
class _Result:
    """The last operator, whose graph node exists as soon as it has returned."""

    tensors: Sequence[torch.Tensor]
    sent: Sent


class TorchOperatorWatch(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped to us
    """PyTorch's implementation of `frameworks.operators.OperatorWatch`."""

    supports_higher_order_operators = True

    def __init__(self, ran: OperatorRan, hold: Callable[[Remove], None], guard: Guard) -> None:
        super().__init__()
        self._ran, self._hold = ran, hold
        self._begin, self._end = guard(self._begins), guard(self._ended)
        self._finish, self._show_kernel = guard(self._settle), guard(self._show)
        self._thread: int | None = None
        """The thread on which the mode is active."""
        self._quiet = False
        """Whether the mode is active and shows nothing."""
        self._inside = 0
        """Operators in progress: operators that they call belong to them."""
        self._last: _Result | None = None
        self._function: _FunctionCall | None = None
        self._launches = KernelLaunches(self._launched)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled. Otherwise torch would run them uncompiled, with other rounding."""
        return True

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.get_ident()
            self.__enter__()
            self._launches.place()
        self._quiet = False

    def stop(self) -> None:
        if self._thread is None:
            return
        if self._thread != threading.get_ident():  # a thread that was interrupted; its mode ends with it
            self._quiet = True
            return
        self._finish(None)
        self._last = self._function = None
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
            self._thread = None
            self._launches.remove()
        else:  # a mode of the user's is still active above it
            self._quiet = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        code = None if self._quiet else self._begin(sys._getframe(1))
        self._inside += 1
        try:
            made = func(*args, **kwargs)
        finally:
            self._inside -= 1
        if code is not None:
            self._end(func, args, kwargs, made, code)
        return made

    def _begins(self, frame: Any) -> CallingCode | None:
        code = calling_code(frame, most=1)
        if code.by_tool:
            return None
        self._settle(code)
        return code

    def _ended(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any, code: CallingCode) -> None:
        results = _tensors(made)
        if code.function is not None:
            self._within_function(code, results)
            return
        name, is_view, writes = _facts(func)
        changed = changed_arguments(func, args, kwargs) if writes else []
        made_by_it = list({id(each): each for each in (*changed, *results)}.values())
        if made_by_it and not is_view:
            self._show(name, _line(code), made_by_it)

    def _within_function(self, code: CallingCode, results: Sequence[torch.Tensor]) -> None:
        if self._function is None:
            self._function = _FunctionCall(code.function or "", _line(code), code.invocation)
        self._function.made += map(weakref.ref, results)

    def _show(self, name: str, line: SourceLine | None, tensors: Sequence[torch.Tensor]) -> None:
        sent = self._ran(name, line, tensors)
        self._last = None if sent is None else _Result(tensors, sent)

    def _settle(self, code: CallingCode | None) -> None:
        """Finish the previous operator, which has its graph node by now; a Function may have returned."""
        function = self._function
        if function is not None and not (code is not None and self._goes_on(function, code)):
            self._function = None
            alive = [tensor for each in function.made if (tensor := each()) is not None]
            returned = [tensor for tensor in alive if _is_made_by(tensor, function.name)] or alive[-1:]
            if returned:
                self._show(function.name, function.line, list({id(each): each for each in returned}.values()))
        last, self._last = self._last, None
        if last is not None:
            self._watch_backward(last)

    def _goes_on(self, function: _FunctionCall, code: CallingCode) -> bool:
        """Whether an operator belongs to the Function call that was seen last. Its own results have no gradient yet."""
        if (code.function, code.invocation) != (function.name, function.invocation):
            return False
        return not any(_is_made_by(tensor, function.name) for each in function.made if (tensor := each()) is not None)

    def _watch_backward(self, last: _Result) -> None:
        # A view's node is made anew when its base has changed; reading the node here would trigger that early.
        own = next((each for each in last.tensors if each.requires_grad and not each._is_view()), None)
        if own is None or own.grad_fn is None:
            return

        def hook(sent: tuple[Any, ...], _received: tuple[Any, ...], seen: Sent = last.sent) -> None:
            seen(sent)

        self._hold(own.grad_fn.register_hook(hook).remove)

    def _launched(self, launch: Callable[[], Any], name: str, arguments: Any, frame: Any) -> Any:
        """Run a Triton kernel. It is an operator of its own unless an operator, or a Function, launches it."""
        here = self._thread == threading.get_ident() and not self._quiet and not self._inside
        code = self._begin(frame) if here else None
        self._inside += 1
        try:
            result = launch()
        finally:
            self._inside -= 1
        if code is not None and code.function is None:
            # A kernel does not say what it writes.
            self._show_kernel(name, _line(code), _tensors(arguments))
        return result


def _line(code: CallingCode) -> SourceLine | None:
    return code.lines[0] if code.lines else None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_made_by(tensor: torch.Tensor, function: str) -> bool:
    """Whether the graph says that an autograd Function of this name returned a tensor."""
    if tensor._is_view() or tensor.grad_fn is None:
        return False
    return bool(tensor.grad_fn.name() == f"{function.rpartition('.')[2]}Backward")


@cache
def _facts(func: Any) -> tuple[str, bool, bool]:
    """Return the name of an operator, whether it computes nothing, and whether it writes to arguments."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return str(getattr(func, "_name", func)), False, False
    name = schema.name.rpartition("::")[2]
    aliased = [each.alias_info for each in schema.returns]
    views = bool(aliased) and all(each is not None and not each.is_write for each in aliased)
    is_view = views or name in _HIDDEN_VIEWS or is_uninitialised(name)
    return name, is_view, bool(schema.is_mutable)

"""Hooks on tensors that report their gradients, also where a view is changed in place."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from tensortap.frameworks.base import GradientCallback, Remove
from tensortap.frameworks.torch.graph import base_of

__all__ = ["GradientHooks", "ParameterHook"]

_MOST_VIEWS = 16


class ParameterHook:
    """A hook on a parameter that leaves nothing behind.

    Torch keeps the empty table of a tensor's hooks when the last one is removed, and enters Python for it at every
    gradient, which takes microseconds for each parameter.
    """

    def __init__(self, parameter: torch.Tensor, seen: GradientCallback) -> None:
        self._parameter = weakref.ref(parameter)
        self._first = parameter._backward_hooks is None
        self._handle = parameter.register_hook(_TensorHook(seen))

    def remove(self) -> None:
        self._handle.remove()
        parameter = self._parameter()
        if self._first and parameter is not None and self._is_table_of(parameter) and not parameter._backward_hooks:
            parameter._backward_hooks = None

    def is_current(self, parameter: torch.Tensor) -> bool:
        """Return whether it is on this parameter, after all hooks of others."""
        return self._is_table_of(parameter) and next(reversed(parameter._backward_hooks), None) == self._handle.id

    def _is_table_of(self, parameter: torch.Tensor) -> bool:
        table = self._handle.hooks_dict_ref()
        return table is not None and table is parameter._backward_hooks


class GradientHooks:
    """Places hooks on tensors."""

    def __init__(self) -> None:
        self.views: deque[_ViewHook] = deque(maxlen=_MOST_VIEWS)
        """The newest outputs that are views. `check_views` drops those that are gone or have changed."""

    def place(self, tensor: torch.Tensor, seen: GradientCallback) -> Remove | None:
        """Call `seen` with the gradient of a tensor. Return what removes the hook; None if it gets no gradient."""
        if not tensor.requires_grad:
            return None
        base = None
        if tensor._is_view():
            # If its memory was changed after its view's node was made, torch makes a new node on access. A hook that is
            # registered before that would crash the process.
            _ = tensor.grad_fn
            base = base_of(tensor)
        if base is None or (node := base.grad_fn) is None:
            remove: Remove = tensor.register_hook(_TensorHook(seen)).remove
            return remove
        hook = _ViewHook(tensor, seen, node)
        self.views.append(hook)
        return hook.remove

    def check_views(self) -> None:
        """Look for views that were changed in place. This runs around every call, while there are views."""
        views = self.views
        with suppress(RuntimeError):  # another thread adds one
            for hook in views:
                if (tensor := hook.tensor()) is None or tensor._version != hook.version:
                    break
            else:
                return  # the usual case
        for _ in range(len(views)):
            try:
                hook = views.popleft()
            except IndexError:  # another thread looks, too
                return
            if (tensor := hook.tensor()) is not None:
                if tensor._version == hook.version:
                    views.append(hook)
                else:
                    hook.watch_base(tensor.shape)


class _TensorHook(partial[None]):
    """A hook that torch omits, without a warning, when its tensor is saved."""

    __slots__ = ()
    __torch_unserializable__ = True


class _ViewHook:
    """Reports the gradient of an output that is a view.

    When a view is changed in place, its old node leaves the graph and a hook on it never fires. The gradient of the
    value before the change then arrives at the base, whose node has to be known from before. It is kept as long as the
    tensor exists, which keeps it itself.
    """

    __slots__ = ("_arrived", "_handles", "_node", "_seen", "_shape", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, seen: GradientCallback, node: Any) -> None:
        self.tensor: Callable[[], torch.Tensor | None] = weakref.ref(tensor, self._release)
        self.version = tensor._version
        self._handles = [tensor.register_hook(_TensorHook(self._at_tensor))]
        self._seen = seen
        self._node = node
        self._arrived = False

    def watch_base(self, shape: torch.Size) -> None:
        """Watch the base from now on: the view, which has this shape, has changed."""
        if self._node is not None:  # otherwise the hook was removed
            self._shape = shape
            self._handles.append(self._node.register_prehook(self._at_base))
            self._node = None

    def _at_tensor(self, gradient: torch.Tensor | None) -> None:
        self._arrived = True
        self._seen(gradient)

    def _at_base(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if self._arrived:
            self._arrived = False
        elif gradients[0] is not None:  # otherwise the view was never used
            self._seen(gradients[0].reshape(self._shape))

    def _release(self, _: Any) -> None:
        self._node = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._node, self.tensor = None, _no_tensor


def _no_tensor() -> None:
    return None

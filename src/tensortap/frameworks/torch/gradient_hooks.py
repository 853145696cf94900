"""Hooks on tensors that report their gradients, also where a view is changed in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from tensortap.frameworks.base import GradientCallback, Remove
from tensortap.frameworks.torch.graph import base_of

__all__ = ["GradientHooks", "ParameterHook", "ViewHook"]

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
        self.views: list[ViewHook] = []
        """The newest outputs that are views. `native/module_hooks.h` looks for changed ones, too."""

    def place(self, tensor: torch.Tensor, seen: GradientCallback) -> Remove | None:
        """Call `seen` with the gradient of a tensor. Return the function that removes the hook; None if it gets no
        gradient.
        """
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
        return self._watch(ViewHook(tensor, seen, node))

    def watch_view(
        self, tensor: torch.Tensor, seen: GradientCallback, node: Any, table: MutableMapping[Any, GradientCallback]
    ) -> Remove:
        """Variant of `place` for a view whose hooks are in `table`, with `seen` under itself. `node` is the node of its
        base.
        """
        return self._watch(ViewHook(tensor, seen, node, table))

    def _watch(self, hook: ViewHook) -> Remove:
        self.views.append(hook)
        if len(self.views) > _MOST_VIEWS:
            del self.views[0]
        return hook.remove

    def check_views(self) -> None:
        """Look for views that were changed in place. This runs around every call, while there are views."""
        for hook in tuple(self.views):
            tensor = hook.tensor()
            if tensor is not None and tensor._version == hook.version:
                continue
            try:
                self.views.remove(hook)
            except ValueError:  # another thread looks, too
                continue
            if tensor is not None:
                hook.watch_base(tensor.shape)


class _TensorHook(partial[None]):
    """A hook that torch omits, without a warning, when its tensor is saved."""

    __slots__ = ()
    __torch_unserializable__ = True


class ViewHook:
    """Reports the gradient of an output that is a view.

    When a view is changed in place, its old node leaves the graph and a hook on it never fires. The gradient of the
    value before the change then arrives at the base, whose node has to be known from before. It is kept as long as the
    tensor exists, which keeps it itself.
    """

    __slots__ = ("_arrived", "_handles", "_node", "_seen", "_shape", "_table", "tensor", "version")

    def __init__(
        self,
        tensor: torch.Tensor,
        seen: GradientCallback,
        node: Any,
        table: MutableMapping[Any, GradientCallback] | None = None,
    ) -> None:
        """`table` has the tensor's hooks, with `seen` under itself, if that is on the tensor already."""
        self.tensor: Callable[[], torch.Tensor | None] = weakref.ref(tensor, self._release)
        self.version = tensor._version
        self._handles = [] if table is not None else [tensor.register_hook(_TensorHook(self._at_tensor))]
        self._table = table
        self._seen = seen
        self._node = node
        self._arrived = False

    def watch_base(self, shape: torch.Size) -> None:
        """Watch the base from now on: the view, which has this shape, has changed."""
        if self._node is not None:  # otherwise the hook was removed
            self._shape = shape
            if self._table is not None and self._seen in self._table:
                self._table[self._seen] = self._at_tensor
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
        if self._table is not None:
            self._table.pop(self._seen, None)
        self._node, self.tensor = None, _no_tensor


def _no_tensor() -> None:
    return None

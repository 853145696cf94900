"""Hooks around the calls of a paddle layer, on every supported version of paddle."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import paddle
from paddle.jit.sot import psdb

from tensortap.frameworks.base import After, Before, Remove
from tensortap.frameworks.hooks import CallHook, Detour

__all__ = ["on_call"]

_ALWAYS_CALLS = "always_call" in inspect.signature(paddle.nn.Layer.register_forward_post_hook).parameters
"""Whether this version runs post-hooks of a layer that raises; paddle 3.0 to 3.2 do not."""


class _LayerHook(CallHook):
    """A hook that stays silent while paddle traces the layer into a static program.

    A trace passes symbolic values, which have no elements. `paddle.jit.save` also passes fewer arguments to the hooks
    of the outermost layer than a call does.
    """

    __slots__ = ()

    def __call__(self, module: Any, *seen: Any) -> Any:
        if psdb.in_sot() or not paddle.in_dynamic_mode():  # SOT inlines this frame and replaces in_sot() by True
            return None
        return super().__call__(module, *seen)


def on_call(layer: Any, before: Before, after: After) -> Remove:
    """Run `before` and `after` around each call of the layer; see `Framework.on_call`."""
    if not _ALWAYS_CALLS:
        return _Calls(layer, before, after).remove
    first = layer.register_forward_pre_hook(_LayerHook(layer, before), with_kwargs=True)
    last = layer.register_forward_post_hook(_LayerHook(layer, lambda _args, output: after(output)), always_call=True)

    def remove() -> None:
        first.remove()
        last.remove()

    return remove


class _Calls:
    """The calls of one layer, where paddle runs no post-hook if the layer raises.

    A detour around the function that runs the hooks closes the calls that an exception has left open.
    """

    def __init__(self, layer: Any, before: Before, after: After) -> None:
        self._before = before
        self._after = after
        self._open = 0
        self._first = layer.register_forward_pre_hook(_LayerHook(layer, self._enter), with_kwargs=True)
        self._last = layer.register_forward_post_hook(_LayerHook(layer, self._leave))
        self._detour = Detour(layer, "_dygraph_call_func", self._around)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._open += 1
        return self._before(args, kwargs)

    def _leave(self, _args: tuple[Any, ...], output: Any) -> Any:
        self._open -= 1
        return self._after(output)

    def _around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outer = self._open
        try:
            return call(*args, **kwargs)
        except Exception:
            while self._open > outer:
                self._open -= 1
                self._after(None)
            raise

    def remove(self) -> None:
        self._first.remove()
        self._last.remove()
        self._detour.remove()

"""Hooks around the calls of a paddle layer, on every supported version of paddle."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import paddle
from paddle.jit.sot import psdb

from tensortap.frameworks.base import AfterCall, BeforeCall, Remove
from tensortap.frameworks.hooks import CallHook, Detour
from tensortap.frameworks.paddle.static import uncompiled

__all__ = ["on_call"]

_ALWAYS_CALLS = "always_call" in inspect.signature(paddle.nn.Layer.register_forward_post_hook).parameters
"""Whether this version runs post-hooks of a layer that raises; paddle 3.0 to 3.2 do not."""


class _LayerHook(CallHook):
    """A hook that does nothing while paddle traces the layer into a static program.

    A trace passes symbolic values, which have no elements. `paddle.jit.save` also passes fewer arguments to the hooks
    of the outermost layer than a call does.
    """

    __slots__ = ("_on_sot",)

    def __init__(self, layer: Any, report: Callable[..., Any], on_sot: Callable[[], None]) -> None:
        super().__init__(layer, report)
        self._on_sot = on_sot

    def __call__(self, module: Any, *seen: Any) -> Any:
        if psdb.in_sot() or not paddle.in_dynamic_mode():  # in_sot() is also True if SOT inlines this frame
            return None
        return uncompiled(super().__call__, module, *seen, on_sot=self._on_sot)


def on_call(layer: Any, before: BeforeCall, after: AfterCall, on_sot: Callable[[], None]) -> Remove:
    """Run `before` and `after` around each call of the layer; see `Hooks.on_call`.

    `on_sot` is called if a function that SOT compiles calls the layer. The hooks have broken its graph then.
    """
    if not _ALWAYS_CALLS:
        return _on_call_that_may_raise(layer, before, after, on_sot)
    first = layer.register_forward_pre_hook(_LayerHook(layer, before, on_sot), with_kwargs=True)
    left = _LayerHook(layer, lambda _args, output: after(output), on_sot)
    last = layer.register_forward_post_hook(left, always_call=True)

    def remove() -> None:
        first.remove()
        last.remove()

    return remove


def _on_call_that_may_raise(layer: Any, before: BeforeCall, after: AfterCall, on_sot: Callable[[], None]) -> Remove:
    """Do the same on versions that run no post-hook if the layer raises.

    A detour around the method that runs the hooks closes the calls that an exception leaves open.
    """
    calls = 0

    def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        calls += 1
        return before(args, kwargs)

    def leave(_args: tuple[Any, ...], output: Any) -> Any:
        nonlocal calls
        calls -= 1
        return after(output)

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if psdb.in_sot():  # `inner` does not work there: SOT binds a method to the object it was read from
            return type(layer)._dygraph_call_func(layer, *args, **kwargs)
        outer = calls
        try:
            return inner(*args, **kwargs)
        except Exception:
            while calls > outer:
                calls -= 1
                after(None)
            raise

    first = layer.register_forward_pre_hook(_LayerHook(layer, enter, on_sot), with_kwargs=True)
    last = layer.register_forward_post_hook(_LayerHook(layer, leave, on_sot))
    detour = Detour(layer, "_dygraph_call_func", around)

    def remove() -> None:
        first.remove()
        last.remove()
        detour.remove()

    return remove

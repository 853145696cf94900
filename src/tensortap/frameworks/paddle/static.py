"""Finds layers and functions that paddle compiles with `to_static`, and runs them uncompiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
from paddle.jit.dy2static.program_translator import StaticFunction

from tensortap.frameworks.base import Remove

__all__ = ["is_compiled", "run_eagerly", "uncompiled"]

_set_eval_frame = paddle.framework.core.set_eval_frame
# After SOT has broken a graph, it compiles each later Python frame, also those of hooks. Exclude this package.
paddle.framework.core.eval_frame_skip_file_prefix((str(Path(__file__).parents[2]) + os.sep,))

_requests: list[object] = []
"""One token for each tap that runs compiled functions uncompiled."""
_compiled_call = StaticFunction.__call__


def is_compiled(layer: Any) -> bool:
    """Return whether `to_static` compiles the layer's forward, from its source (AST) or bytecode (SOT)."""
    return isinstance(layer.forward, StaticFunction)


def run_eagerly() -> Remove:
    """Run all functions under `to_static` as plain Python until the returned function is called.

    `paddle.jit.enable_to_static(False)` does so too, but it is the user's setting, and `paddle.jit.save` fails with it.
    """
    token = object()
    _requests.append(token)
    StaticFunction.__call__ = _eager_call

    def remove() -> None:
        if token in _requests:
            _requests.remove(token)
        if not _requests:
            StaticFunction.__call__ = _compiled_call

    return remove


def _eager_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    if paddle.in_dynamic_mode():
        return function.dygraph_function(*args, **kwargs)
    return _compiled_call(function, *args, **kwargs)


def uncompiled(function: Callable[..., Any], *args: Any, on_sot: Callable[[], None] = lambda: None) -> Any:
    """Call a function from a hook of paddle, and keep SOT from compiling what it calls.

    `on_sot` is called first if SOT is active.
    """
    compiler = _set_eval_frame(None)
    if compiler is None:
        return function(*args)
    try:
        on_sot()
        return function(*args)
    finally:
        _set_eval_frame(compiler)

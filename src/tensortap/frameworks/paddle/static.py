"""Layers and functions that paddle compiles with `to_static`: how to find them, and how to run them uncompiled."""

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
# Once SOT has broken a graph, it compiles each Python frame that follows, hooks included. Keep it out of this package.
paddle.framework.core.eval_frame_skip_file_prefix((str(Path(__file__).parents[2]) + os.sep,))

_asking: list[object] = []
"""One token for each tap that wants compiled functions to run uncompiled."""
_compiled_call = StaticFunction.__call__


def is_compiled(layer: Any) -> bool:
    """Whether `to_static`, by tracing the source (AST) or the bytecode (SOT), compiles the layer's forward."""
    return isinstance(layer.forward, StaticFunction)


def run_eagerly() -> Remove:
    """Run all functions under `to_static` as plain Python until the returned function has been called.

    `paddle.jit.enable_to_static(False)` would do so too, but it belongs to the user, and `paddle.jit.save` refuses to
    work under it.
    """
    token = object()
    _asking.append(token)
    StaticFunction.__call__ = _eager_call

    def remove() -> None:
        if token in _asking:
            _asking.remove(token)
        if not _asking:
            StaticFunction.__call__ = _compiled_call

    return remove


def _eager_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    if paddle.in_dynamic_mode():
        return function.dygraph_function(*args, **kwargs)
    return _compiled_call(function, *args, **kwargs)


def uncompiled(function: Callable[..., Any], *args: Any, met: Callable[[], None] = lambda: None) -> Any:
    """Call a function of ours from a hook of paddle's, and keep SOT from compiling what it calls in turn.

    `met` is called first if SOT is at work.
    """
    compiler = _set_eval_frame(None)
    if compiler is None:
        return function(*args)
    try:
        met()
        return function(*args)
    finally:
        _set_eval_frame(compiler)

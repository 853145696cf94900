"""Exceptions of a user's signal handler that ran while code of this library was running.

Python runs a signal handler between two instructions of whatever code the main thread executes, also of a hook. An
exception that the handler raises belongs to the user, although it surfaces inside this library.
"""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType, FrameType, TracebackType
from typing import Any

__all__ = ["interrupt_in", "raise_interrupt", "suppress_errors"]


def interrupt_in(error: BaseException | None) -> BaseException | None:
    """Return the exception that a signal handler raised: this one, or one that it was raised from; None if neither.

    The interpreter calls a handler with the signal's number and the interrupted frame. So a frame in the traceback is a
    handler's if its arguments include the very frame that it was called from, after a number. The code of installed
    handlers is recognised, too, in case a handler has deleted its arguments.
    """
    while error is not None:
        if _passed_handler(error.__traceback__):
            return error
        error = error.__cause__
    return None


def raise_interrupt(error: BaseException) -> None:
    """Raise the exception that a signal handler raised, if this error is one or was raised from one."""
    if (interrupt := interrupt_in(error)) is not None:
        raise interrupt


@contextmanager
def suppress_errors() -> Iterator[None]:
    """Suppress every Exception, except one that a signal handler raised."""
    try:
        yield
    except Exception as error:
        raise_interrupt(error)


def _passed_handler(trace: TracebackType | None) -> bool:
    installed = _installed_handlers()
    while trace is not None and (inner := trace.tb_next) is not None:
        if inner.tb_frame.f_code in installed or _got_frame(inner.tb_frame, trace.tb_frame):
            return True
        trace = inner
    return False


def _got_frame(frame: FrameType, interrupted: FrameType) -> bool:
    """Return whether a frame's arguments include a number and then the interrupted frame."""
    code, values = frame.f_code, frame.f_locals
    arguments = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        arguments += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    # Not isinstance: it runs code of the value, which may raise.
    return any(issubclass(type(number), int) and given is interrupted for number, given in pairwise(arguments))


def _installed_handlers() -> set[CodeType]:
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return {code for handler in handlers if (code := _code_of(handler)) is not None}


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if not hasattr(handler, "__code__"):
        handler = vars(type(handler)).get("__call__")
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None

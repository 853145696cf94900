"""Decorators for functions that numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["REORDER", "compiled", "entry", "short_entry"]

Function = TypeVar("Function", bound=Callable[..., Any])
REORDER = {"reassoc", "nsz", "contract"}
"""LLVM vectorises a sum of floats only if it may reorder it. NaN and inf keep their meaning, except in loops over
finite numbers, which add `nnan`."""


def compiled(fastmath: set[str] | None = None, nogil: bool = True, **options: Any) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        compiled: Function = numba.njit(nogil=nogil, error_model="numpy", fastmath=fastmath or False, **options)(
            function
        )
        return compiled

    return decorate


def entry(function: Function, nogil: bool = True) -> Function:
    """Compile a function that Python calls; cache it on disk if numba finds a folder."""
    try:
        return compiled(nogil=nogil, cache=True)(function)
    except RuntimeError:
        return compiled(nogil=nogil)(function)


def short_entry(function: Function) -> Function:
    """The same for a function that takes less time than passing the interpreter to another thread and back."""
    return entry(function, nogil=False)

"""Compiled functions: loaded from numba's cache, or compiled with a log message that explains the delay."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba.core import event

__all__ = ["announced", "load"]

_log = logging.getLogger("tensortap")


def _import_masked_arrays() -> None:
    """Import numpy.ma, which numba needs and NumPy imports on first use.

    The import fails where a package has set `np.bool = bool`, as many do that were written for older versions of NumPy.
    """
    names = vars(np)
    given = names.get("bool")
    if given is bool:
        names["bool"] = np.bool_
    try:
        importlib.import_module("numpy.ma")
    finally:
        if given is bool:
            names["bool"] = given


_import_masked_arrays()


class _Announce(event.Listener):  # type: ignore[misc]  # numba is untyped
    """Logs the compilation of a function. numba calls it only if its cache does not have the code."""

    def __init__(self, function: Any, what: str) -> None:
        self._function = function
        self._what = what

    def on_start(self, started: Any) -> None:
        if started.data["dispatcher"] is self._function:
            _log.warning("tensortap: compiling its %s (once, then cached) …", self._what)

    def on_end(self, ended: Any) -> None:
        pass


@contextmanager
def announced(function: Any, what: str) -> Iterator[None]:
    """Log a message if `function` is compiled within the block."""
    with event.install_listener("numba:compile", _Announce(function, what)):
        yield


def load(function: Any, signature: Any) -> None:
    """Compile a function for a signature, or load it from the cache."""
    try:
        function.compile(signature)
    except OSError as error:  # compiled, but not cached: compile for this process only
        _log.debug("cannot cache compiled code: %s", error)
        function.compile(signature)

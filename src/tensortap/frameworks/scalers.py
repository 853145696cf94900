"""Steps that run through a gradient scaler, which skips steps with infinite gradients.

An optimizer does not know its scaler. So the methods of the scaler's class are replaced while an optimizer is watched,
and restored when the last watch ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

from tensortap.frameworks.base import Remove

__all__ = ["ScaledSteps", "ScalerListener"]


class ScalerListener(Protocol):
    """Listens to the steps of one optimizer that run through a scaler."""

    def begins(self, scaler: Any, optimizer: Any) -> bool:
        """Return whether the step that begins is one of the watched optimizer."""

    def ends(self, scaler: Any, completed: bool) -> None:
        """Called after such a step; `completed` says that it did not raise."""


class ScaledSteps:
    """Calls listeners around methods of a scaler's class that take an optimizer first."""

    def __init__(self, methods: Sequence[str]) -> None:
        self._methods = methods
        self._listeners: list[ScalerListener] = []
        self._undo: list[Remove] = []
        self._lock = threading.Lock()

    def watch(self, cls: type, listener: ScalerListener) -> Remove:
        """Call a listener around the steps that run through scalers of a class, or of one derived from it."""
        with self._lock:
            if not self._listeners:
                self._undo = [_replace(cls, name, self._around) for name in self._methods if name in vars(cls)]
            self._listeners.append(listener)

        def remove() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)
                    if not self._listeners:
                        for undo in self._undo:
                            undo()

        return remove

    def _around(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        begun = [listener for listener in list(self._listeners) if listener.begins(scaler, optimizer)]
        completed = False
        try:
            result = original(scaler, optimizer, *args, **kwargs)
            completed = True
        finally:
            for listener in begun:
                listener.ends(scaler, completed)
        return result


def _replace(cls: type, name: str, around: Callable[..., Any]) -> Remove:
    original = vars(cls)[name]

    @wraps(original)
    def replacement(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, scaler, optimizer, *args, **kwargs)

    setattr(cls, name, replacement)

    def undo() -> None:
        if vars(cls).get(name) is replacement:
            setattr(cls, name, original)

    return undo

"""Gradient scalers: the losses that they multiply, and the steps that run through them, some of which they skip.

Neither an optimizer nor a loss knows its scaler. So methods of the scaler's class are replaced while somebody listens,
and restored when the last one stops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Generic, Protocol, TypeVar

from tensortap.frameworks.base import Remove

__all__ = ["ScaledLosses", "ScaledSteps", "ScalerListener"]


class ScalerListener(Protocol):
    """Listens to the steps of one optimizer that run through a scaler."""

    def begins(self, scaler: Any, optimizer: Any) -> bool:
        """Return whether the step that begins is one of the watched optimizer."""

    def ends(self, scaler: Any, completed: bool) -> None:
        """Called after such a step; `completed` says that it did not raise."""


Listener = TypeVar("Listener")


class _Replaced(Generic[Listener]):
    """Methods of a scaler's class that are replaced while there are listeners."""

    def __init__(self, methods: Sequence[str]) -> None:
        self._methods = methods
        self._listeners: list[Listener] = []
        self._undo: list[Remove] = []
        self._lock = threading.Lock()

    def watch(self, cls: type, listener: Listener) -> Remove:
        """Call a listener for scalers of a class, or of one derived from it."""
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

    def _around(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class ScaledLosses(_Replaced[Callable[[Any, Any], None]]):
    """Calls listeners with the scaler, and the loss that it has multiplied."""

    def _around(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        for listener in list(self._listeners):
            listener(scaler, result)
        return result


class ScaledSteps(_Replaced[ScalerListener]):
    """Calls listeners around methods of a scaler's class that take an optimizer first."""

    def _around(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = args[0] if args else kwargs.get("optimizer")
        begun = [listener for listener in list(self._listeners) if listener.begins(scaler, optimizer)]
        completed = False
        try:
            result = original(scaler, *args, **kwargs)
            completed = True
        finally:
            for listener in begun:
                listener.ends(scaler, completed)
        return result


def _replace(cls: type, name: str, around: Callable[..., Any]) -> Remove:
    original = vars(cls)[name]

    @wraps(original)
    def replacement(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, scaler, *args, **kwargs)

    setattr(cls, name, replacement)

    def undo() -> None:
        if vars(cls).get(name) is replacement:
            setattr(cls, name, original)

    return undo

"""Names for several models of one recording: the variables that hold them, else their classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

__all__ = ["names_of"]


def names_of(models: Sequence[Any]) -> dict[str, Any]:
    """Return the models by name.

    A name is that of a variable in a function that is running, of an attribute of its `self`, or of the class. The
    innermost function that names a model decides.
    """
    named: dict[str, Any] = {}
    for model in models:
        name = base = _variable(model) or type(model).__name__.lower()
        number = 1
        while name in named:
            number += 1
            name = f"{base}_{number}"
        named[name] = model
    return named


def _variable(model: Any) -> str | None:
    same = {id(model), *(id(inner) for inner in vars(model).get("_modules", {}).values())}  # of a wrapper
    for variables in _scopes():
        for name, value in list(variables.items()):
            if id(value) in same and name.isidentifier() and name not in ("self", "module", "model"):
                return name
    return None


def _scopes() -> Iterator[Mapping[str, Any]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("tensortap.", "torch.", "paddle.", "contextlib")):
            yield frame.f_locals
            owner = frame.f_locals.get("self")
            if owner is not None and hasattr(owner, "__dict__"):
                yield vars(owner)
                yield vars(owner).get("_modules") or {}
        frame = frame.f_back

"""The argument `optimizer=`: one optimizer, several, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["optimizer_list"]


def optimizer_list(given: Any) -> list[Any]:
    """Return the optimizers of None, of one optimizer, or of a list, a tuple or a dict of them."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, (list, tuple)) else [given]

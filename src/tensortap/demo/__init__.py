"""The demo: a small training run that shows tensortap at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensortap.errors import MissingDependency

__all__ = ["trainer"]


def trainer() -> Callable[..., Any]:
    """Return `demo.model.train`. Raise MissingDependency without torch."""
    try:
        from tensortap.demo.model import train
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependency(
            'the demo trains a small model with torch, which is not installed: pip install "tensortap[torch]"'
        ) from error
    return train

"""The contract between comparisons and `zoom`: run the module of a verdict again, and name the line.

Comparisons live in packages that must not import `zoom`. They ask `zooms()`; the package connects it when it is
imported, and `zoom` itself is loaded at the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tensortap.core.records import Comparison

__all__ = ["ZoomSides", "Zooms", "connect", "zooms"]

ZoomSides = tuple[Any, Any]
"""The reference's model and the candidate's: each a model, or "file.py:function" that builds one."""


class Zooms(Protocol):
    """The functions of `tensortap.zoom.verdict`."""

    def check_models(self, models: Any, /) -> None:
        """Raise UsageError if these are not two models, or functions that build them."""

    def zoom_comparison(
        self, comparison: Comparison, reference: Any, candidate: Any, models: ZoomSides, module: str | None = None, /
    ) -> Comparison:
        """Return the comparison with the line where the module of its first finding differs, or a note why not.

        reference, candidate: the runs; None for a candidate that was not recorded.
        module: the candidate's name of the module, if it differs.
        """


_loaders: list[Callable[[], Zooms]] = []


def connect(load: Callable[[], Zooms]) -> None:
    """Set the function that loads the implementation."""
    _loaders[:] = [load]


def zooms() -> Zooms:
    """Return the implementation; the first call imports it."""
    return _loaders[0]()

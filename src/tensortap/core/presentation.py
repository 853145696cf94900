"""The contract between results and `report`: how a result is saved, and what a notebook shows of it.

Results live in packages that must not import `report`. They ask `reports()`; the package connects it when it is
imported, and `report` itself is loaded at the first call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tensortap.core.records import Comparison, Coverage, HealthReport

__all__ = ["CoverageByRank", "CoverageRows", "Reports", "connect", "reports"]


class Reports(Protocol):
    """The functions of `tensortap.report.notebook`."""

    def save_comparison(self, comparison: Comparison, path: str | os.PathLike[str], /) -> Path: ...

    def comparison_html(self, comparison: Comparison, /) -> str: ...

    def health_html(self, report: HealthReport, /) -> str: ...

    def run_html(self, run: Any, /) -> str: ...

    def tap_html(
        self, title: str, stats: Mapping[str, Any], coverage: Sequence[Coverage], notices: Sequence[str], /
    ) -> str: ...

    def coverage_html(self, coverage: Mapping[int, Sequence[Coverage]], /) -> str: ...


_loaders: list[Callable[[], Reports]] = []


def connect(load: Callable[[], Reports]) -> None:
    """Set the function that loads the implementation."""
    _loaders[:] = [load]


def reports() -> Reports:
    """Return the implementation; the first call imports it."""
    return _loaders[0]()


class CoverageRows(list["Coverage"]):
    """The coverage of each module; a notebook shows it as a table."""

    def _repr_html_(self) -> str:
        return reports().coverage_html({0: self})


class CoverageByRank(dict[int, "list[Coverage]"]):
    """The coverage of each module, by rank; a notebook shows it as a table."""

    def _repr_html_(self) -> str:
        return reports().coverage_html(self)

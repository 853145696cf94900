"""A single run: where NaN is born, and layers that are dead, explode or vanish."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

from tensortap.core.records import HealthReport

if TYPE_CHECKING:
    from tensortap.store import Run

__all__ = ["health"]


def health(
    run: str | os.PathLike[str] | Run,
    *,
    steps: Collection[int] | None = None,
    ranks: Collection[int] | None = None,
    modules: str | Collection[str] | None = None,
    kinds: str | Collection[str] | None = None,
    details: int = 0,
) -> HealthReport:
    """Examine a single run for what is usually a mistake, and name where it first shows.

    run: a path that `tensortap.open` reads, or an open run, also in memory.
    steps, ranks, modules, kinds: the records to examine; name patterns for modules.
    details: number of tensors to inspect element by element, for `HealthReport.details`.

    The verdict is "healthy", "suspicious", or "empty" if there is no record. Suspicious are NaN and Inf, layers that
    explode or vanish, layers that are zero in every step, and ranks whose replicas differ;
    `tensortap.health.diagnosis` has the exact definitions.

    >>> report = tensortap.health("runs/a")
    >>> print(report)
    NaN or Inf is born in output 0 of layers.2.norm (LayerNorm) in step 3: it has 1 NaN and 0 Inf among 24 elements.
    >>> [finding.key.module for finding in report.births]
    ['layers.2.norm']
    """
    from contextlib import ExitStack

    from tensortap.compare.align.side import Scope  # loads pyarrow: not before it is needed
    from tensortap.health.diagnosis import open_health_report

    with ExitStack() as opened:
        return open_health_report(run, Scope(modules, kinds, steps, ranks), opened, details)[0]

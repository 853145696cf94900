"""The sources of a comparison: paths, or runs that are open already."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack

from tensortap.errors import UsageError
from tensortap.kernels import summarize
from tensortap.store import Run
from tensortap.store.formats import open_any

__all__ = ["Source", "noise_sources", "open_source"]

Source = str | os.PathLike[str] | Run


def open_source(source: Source, opened: ExitStack) -> Run:
    """Open a run until `opened` ends. A run that the caller has open stays open."""
    return source if isinstance(source, Run) else opened.enter_context(open_any(source, summarize))


def noise_sources(given: Source | Iterable[Source] | None) -> tuple[Source, ...]:
    """Return the argument `noise=` as a tuple. A string, a path or an open run is one source."""
    if isinstance(given, (str, os.PathLike, Run)):
        return (given,)
    several = tuple(given) if isinstance(given, Iterable) else (given,) if given is not None else ()
    for each in several:
        if not isinstance(each, (str, os.PathLike, Run)):
            raise UsageError(
                f"noise takes a path, an open run, or a sequence of these, not a {type(each).__qualname__}: "
                "pass a noise file of tensortap.noise or another run of the reference"
            )
    return several

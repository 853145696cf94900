"""What is asked of a comparison."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tensortap.errors import UsageError
from tensortap.kernels import summarize
from tensortap.store import Run
from tensortap.store.formats import open_any

__all__ = ["Request", "Source", "noise_sources", "open_source"]

Source = str | os.PathLike[str] | Run


@dataclass(frozen=True)
class Request:
    """What was asked; see `tensortap.compare`."""

    reference: Source
    candidate: Source
    rename: tuple[str, ...] = ()
    map_file: str | os.PathLike[str] | None = None
    mapping: str | os.PathLike[str] | Mapping[str, Any] | None = None
    steps: Collection[int] | Mapping[int, int] | None = None
    ranks: Collection[int] | Mapping[int, int] | None = None
    modules: str | Collection[str] | None = None
    kinds: str | Collection[str] | None = None
    rtol: float | None = None
    atol: float | None = None
    noise: tuple[Source, ...] = ()
    until_first: bool = False
    workers: int | None = None
    device: str = "cpu"
    details: int = 0
    progress: Callable[[int, int], None] | None = None

    @property
    def options(self) -> list[str] | None:
        """What on the command line decides which records belong together and what is allowed; None if it cannot be
        said there, as rules that are in no file or runs in memory."""
        sources = (self.reference, self.candidate, *self.noise)
        if any(isinstance(source, Run) and source.in_memory for source in sources):
            return None
        maps = [given for given in (self.map_file, self.mapping) if given is not None]
        if len(maps) > 1 or (self.mapping is not None and not str(self.mapping).endswith(".toml")):
            return None
        found = [("rename", rule) for rule in self.rename]
        found += [("noise", str(each.path if isinstance(each, Run) else each)) for each in self.noise]
        found += [
            (name, repr(given)) for name, given in (("rtol", self.rtol), ("atol", self.atol)) if given is not None
        ]
        found += [("map", str(given)) for given in maps]
        if isinstance(self.steps, Mapping) and any(ours != theirs for ours, theirs in self.steps.items()):
            found.append(("step", ",".join(f"{ours}:{theirs}" for ours, theirs in self.steps.items())))
        return [part for name, value in found for part in (f"--{name}", value)]


def open_source(source: Source, opened: ExitStack) -> Run:
    """A run that the caller has open stays open; one that is opened here is closed with the comparison."""
    return source if isinstance(source, Run) else opened.enter_context(open_any(source, summarize))


def noise_sources(given: Source | Iterable[Source] | None) -> tuple[Source, ...]:
    """What a caller passed as `noise=`, as a tuple. A string, a path or an open run is one source."""
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

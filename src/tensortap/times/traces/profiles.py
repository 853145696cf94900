"""Read a profile of either framework, live or exported, into a timeline."""

from __future__ import annotations

import os
from typing import Any

from tensortap.errors import RunUnreadable, UsageError
from tensortap.times.timeline import Timeline
from tensortap.times.traces.json_stream import Progress, trace_events
from tensortap.times.traces.paddle import PADDLE
from tensortap.times.traces.source import ProfileSource
from tensortap.times.traces.torch import TORCH

__all__ = ["HOW_TO_ANNOTATE", "read_profile", "read_trace"]

_SOURCES: tuple[ProfileSource, ...] = (PADDLE, TORCH)
"""In the order in which they are tried; the last one reads any trace."""

HOW_TO_ANNOTATE = (
    "annotate the model while it is profiled, like `with tensortap.annotate(model), torch.profiler.profile() as prof:`"
)


def read_profile(source: Any, progress: Progress | None = None) -> Timeline:
    """Read a stopped profiler, or an exported trace by its path.

    Raise UsageError if it has no span of `tensortap.annotate`.
    """
    if isinstance(source, (str, os.PathLike)):
        return read_trace(source, progress)
    for known in _SOURCES:
        if known.accepts(source):
            return _check(known.read_profile(source), "this profile")
    raise UsageError(
        f"cannot read times from a {type(source).__qualname__}: give a torch.profiler.profile or a "
        "paddle.profiler.Profiler that has stopped, or the path of an exported trace"
    )


def read_trace(path: str | os.PathLike[str], progress: Progress | None = None) -> Timeline:
    """Read a trace of torch's `export_chrome_trace` or paddle's `Profiler.export`, gzipped or not."""
    timeline, add = None, TORCH.add_event
    for event in trace_events(path, progress):
        if timeline is None and event.get("ph") in ("X", "i") and event.get("tid"):
            known = next(each for each in _SOURCES if each.is_event(event))
            timeline, add = known.new_timeline(), known.add_event
        if timeline is not None:
            try:
                add(timeline, event)
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                raise RunUnreadable(f"{os.fspath(path)} has an event that cannot be read: {event!r:.200}") from error
    if timeline is None:
        raise RunUnreadable(
            f"{os.fspath(path)} holds no events: nothing ran while the profiler recorded. Profile at least one step"
        )
    return _check(timeline, os.fspath(path))


def _check(timeline: Timeline, name: str) -> Timeline:
    if timeline.begin > timeline.end:
        raise UsageError(
            f"{name} has no events of the CPU, so kernels cannot be attributed to modules: record them, too, with "
            "`activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`"
        )
    if not timeline.marked:
        raise UsageError(f"{name} has no spans of tensortap.annotate: {HOW_TO_ANNOTATE}")
    return timeline

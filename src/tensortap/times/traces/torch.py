"""Fills a timeline from PyTorch: from the events of an exported Chrome trace, or from a profiler that has stopped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tensortap.errors import UsageError
from tensortap.times.timeline import Timeline
from tensortap.times.traces.source import ProfileSource

__all__ = ["TORCH"]

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "concurrent_kernel", "mtia_ccp_events"})
_NOT_HOST = frozenset({"python_function", "overhead", "Trace", "gpu_user_annotation", "cuda_sync"})
"""Python frames, the profiler's own work, its window, and what a device's lane has beside kernels."""
_SYNCS = frozenset({"Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event"})
_MEMORY = "[memory]"
_RUNTIME = re.compile(r"(?:cu|hip|ze|ur|musa|acl)(?:[A-Z]|da[A-Z])")
"""Calls of a device's runtime: cudaLaunchKernel, cuLaunchKernelEx, hipLaunchKernel, ..."""


def _add_event(timeline: Timeline, event: Mapping[str, Any]) -> None:
    """Add one event of a trace that `export_chrome_trace` has written."""
    sort, category = event.get("ph"), event.get("cat")
    if sort == "X":
        if category in _NOT_HOST:
            return
        start = round(event["ts"] * 1000)
        end = start + round(event.get("dur", 0) * 1000)
        arguments = event.get("args") or {}
        correlation, operator = arguments.get("correlation"), arguments.get("External id")
        if category in _ON_DEVICE:
            device = arguments.get("device", event.get("pid", 0))
            timeline.kernels.add(_whole(device), start, end, _whole(correlation), _whole(operator))
            return
        thread = timeline.thread((event.get("pid"), event.get("tid")))
        timeline.host(thread, start, end, event.get("name", ""))
        if correlation is not None:
            timeline.launches.add(_whole(correlation), thread, start)
        elif operator is not None:
            timeline.operators.add(_whole(operator), thread, start)
    elif sort == "i" and event.get("name") == _MEMORY:
        arguments = event.get("args") or {}
        thread = timeline.thread((event.get("pid"), event.get("tid")))
        on_device = arguments.get("Device Type", 0) != 0
        timeline.memory.add(thread, round(event["ts"] * 1000), _whole(arguments.get("Bytes"), 0), on_device)


def _read_profile(profile: Any) -> Timeline:
    """Read a `torch.profiler.profile`, or the older `torch.autograd.profiler.profile`, that has stopped."""
    results = getattr(getattr(profile, "profiler", profile), "kineto_results", None)
    if results is None:
        raise UsageError(
            "this profile holds no events: give it after its `with` block or its stop(), and export or read it inside "
            "on_trace_ready if it has a schedule"
        )
    timeline = _new_timeline()
    for event in results.events():
        device = event.device_type().name
        start = event.start_ns()
        name = event.name()
        if name == _MEMORY:
            thread = timeline.thread(event.device_resource_id())
            timeline.memory.add(thread, start, event.nbytes(), device not in ("CPU", "MKLDNN", "IDEEP"))
        elif device != "CPU":
            if not event.is_user_annotation() and name not in _SYNCS:
                end = start + event.duration_ns()
                operator = event.linked_correlation_id() or -1
                timeline.kernels.add(event.device_index(), start, end, event.correlation_id(), operator)
        elif not _is_hidden(event):
            thread = timeline.thread(event.device_resource_id())
            timeline.host(thread, start, start + event.duration_ns(), name)
            if _RUNTIME.match(name):
                timeline.launches.add(event.correlation_id(), thread, start)
            else:
                timeline.operators.add(event.correlation_id(), thread, start)
    return timeline


def _is_hidden(event: Any) -> bool:
    """Python frames and the profiler's own work; the latter belongs to no thread."""
    return bool(
        event.device_resource_id() == 0
        or getattr(event, "is_hidden_event", bool)()
        or getattr(event, "is_python_function", bool)()
    )


def _whole(value: Any, default: int = -1) -> int:
    """Numbers are numbers in some versions and text in others."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return default


def _new_timeline() -> Timeline:
    return Timeline("torch", backward_calls="graph nodes")


TORCH = ProfileSource(
    framework="torch",
    package="torch",
    is_profile=lambda profile: hasattr(profile, "kineto_results") or hasattr(profile, "profiler"),
    read_profile=_read_profile,
    is_event=lambda event: True,  # Chrome traces have no mark of their writer: those without another's are torch's
    add_event=_add_event,
    new_timeline=_new_timeline,
)

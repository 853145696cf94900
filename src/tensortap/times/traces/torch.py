"""Fill a timeline from PyTorch: from the events of an exported Chrome trace, or from a stopped profiler."""

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
"""Python frames, the profiler's own work, its window, and events on a device's lane that are not kernels."""
_SYNCS = frozenset({"Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event"})
_MEMORY = "[memory]"
_RUNTIME = re.compile(r"(?:cu|hip|ze|ur|musa|acl)(?:[A-Z]|da[A-Z])")
"""Calls of a device's runtime: cudaLaunchKernel, cuLaunchKernelEx, hipLaunchKernel, ..."""


def _add_event(timeline: Timeline, event: Mapping[str, Any]) -> None:
    """Add one event of a trace that `export_chrome_trace` wrote."""
    event_type, category = event.get("ph"), event.get("cat")
    if event_type == "X":
        if category in _NOT_HOST:
            return
        start = round(event["ts"] * 1000)
        end = start + round(event.get("dur", 0) * 1000)
        arguments = event.get("args") or {}
        correlation, operator = arguments.get("correlation"), arguments.get("External id")
        if category in _ON_DEVICE:
            device = arguments.get("device", event.get("pid", 0))
            timeline.kernels.add(_integer(device), start, end, _integer(correlation), _integer(operator))
            return
        thread = timeline.thread((event.get("pid"), event.get("tid")))
        timeline.add_host_event(thread, start, end, event.get("name", ""))
        if correlation is not None:
            timeline.launches.add(_integer(correlation), thread, start)
        elif operator is not None:
            timeline.operators.add(_integer(operator), thread, start)
    elif event_type == "i" and event.get("name") == _MEMORY:
        arguments = event.get("args") or {}
        thread = timeline.thread((event.get("pid"), event.get("tid")))
        on_device = arguments.get("Device Type", 0) != 0
        timeline.memory.add(thread, round(event["ts"] * 1000), _integer(arguments.get("Bytes"), 0), on_device)


def _read_profile(profile: Any) -> Timeline:
    """Read a stopped `torch.profiler.profile`, or the older `torch.autograd.profiler.profile`."""
    results = getattr(getattr(profile, "profiler", profile), "kineto_results", None)
    if results is None:
        raise UsageError(
            "this profile holds no events: it has not stopped, or its schedule has dropped them. Pass it after its "
            "`with` block or stop(); with a schedule, export or read it inside on_trace_ready"
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
            timeline.add_host_event(thread, start, start + event.duration_ns(), name)
            if _RUNTIME.match(name):
                timeline.launches.add(event.correlation_id(), thread, start)
            else:
                timeline.operators.add(event.correlation_id(), thread, start)
    return timeline


def _is_hidden(event: Any) -> bool:
    """Return whether this is a Python frame or the profiler's own work, which has no thread."""
    return bool(
        event.device_resource_id() == 0
        or getattr(event, "is_hidden_event", bool)()
        or getattr(event, "is_python_function", bool)()
    )


def _integer(value: Any, default: int = -1) -> int:
    """Return an integer. Some versions of the profiler write numbers as text."""
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

"""Fill a timeline from PaddlePaddle: from the events of an exported trace, or from a stopped profiler."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tensortap.errors import UsageError
from tensortap.times.timeline import Timeline
from tensortap.times.traces.source import ProfileSource

__all__ = ["PADDLE"]

_ON_DEVICE = frozenset({"Kernel", "Memcpy", "Memset"})
_RUNTIME = frozenset({"CudaRuntime", "MluRuntime"})
_LENGTH = re.compile(r"\[[\d.]+ [mu]s\]$")
"""Paddle appends the length of an event to its name."""
_THREAD = re.compile(r"(\d+)\((?:Python|C\+\+)\)")
"""A thread has two lanes, one for Python and one for C++."""


def _is_event(event: Mapping[str, Any]) -> bool:
    """Return whether paddle's profiler wrote this event of a trace."""
    return _THREAD.fullmatch(str(event.get("tid"))) is not None


def _add_event(timeline: Timeline, event: Mapping[str, Any]) -> None:
    """Add one event of a trace that `paddle.profiler.Profiler.export` wrote."""
    event_type, arguments = event.get("ph"), event.get("args") or {}
    if event_type == "X" and "start_time" in arguments:
        # `ts` is truncated to whole microseconds; these are exact and count from the first event.
        start, end = _nanoseconds(arguments["start_time"]), _nanoseconds(arguments["end_time"])
        category, correlation = event.get("cat"), int(arguments.get("correlation id", -1))
        if category in _ON_DEVICE:
            device = int(arguments.get("device", event.get("pid", 0)))
            timeline.kernels.add(device, start, end, correlation, -1)
            return
        thread = timeline.thread(_thread(event))
        timeline.add_host_event(thread, start, end, _name(_LENGTH.sub("", event.get("name", "")), str(category)))
        if category in _RUNTIME:
            timeline.launches.add(correlation, thread, start)
        if timeline.origin is None:
            timeline.origin = int(event["ts"]) * 1000 - start
    elif event.get("name") == "[memory]" and timeline.origin is not None:
        at = int(event["ts"]) * 1000 - timeline.origin
        on_device = "cpu" not in str(arguments.get("place"))
        timeline.memory.add(timeline.thread(_thread(event)), at, int(arguments["increase_bytes"]), on_device)


def _read_profile(profile: Any) -> Timeline:
    """Read a stopped `paddle.profiler.Profiler`."""
    result = getattr(profile, "profiler_result", None)
    if result is None:
        raise UsageError(
            "this profile holds no events: it has not stopped, or has not recorded. Pass it after its `with` block or "
            "stop()"
        )
    timeline = _new_timeline()
    pending = [node for root in result.get_data().values() for node in root.children_node]
    while pending:
        node = pending.pop()
        pending.extend(node.children_node)
        thread = timeline.thread(node.thread_id)
        timeline.add_host_event(thread, node.start_ns, node.end_ns, _name(node.name, node.type.name))
        for call in node.runtime_node:
            timeline.add_host_event(thread, call.start_ns, call.end_ns, call.name)
            timeline.launches.add(call.correlation_id, thread, call.start_ns)
            for work in call.device_node:
                timeline.kernels.add(work.device_id, work.start_ns, work.end_ns, call.correlation_id, -1)
        for event in node.mem_node:
            on_device = "cpu" not in str(event.place)
            timeline.memory.add(thread, event.timestamp_ns, event.increase_bytes, on_device)
    return timeline


def _name(name: str, category: str) -> str:
    """Return the name of an event. Only the category identifies a data loader."""
    return f"enumerate(DataLoader)#{name}" if category == "Dataloader" else name


def _thread(event: Mapping[str, Any]) -> tuple[Any, str]:
    found = _THREAD.fullmatch(str(event.get("tid")))
    return event.get("pid"), found[1] if found else str(event.get("tid"))


def _nanoseconds(text: str) -> int:
    return round(float(text.partition(" ")[0]) * 1000)


def _new_timeline() -> Timeline:
    return Timeline("paddle", backward_calls="module calls")


PADDLE = ProfileSource(
    framework="paddle",
    package="paddle",
    is_profile=lambda profile: hasattr(profile, "profiler_result"),
    read_profile=_read_profile,
    is_event=_is_event,
    add_event=_add_event,
    new_timeline=_new_timeline,
)

"""The contract of a profiler whose profiles can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensortap.times.timeline import Timeline

__all__ = ["ProfileSource"]


@dataclass(frozen=True)
class ProfileSource:
    """One framework's profiler: how its live profiles and its exported traces are recognised and read."""

    framework: str
    package: str
    """The root package of its profiler classes."""
    is_profile: Callable[[Any], bool]
    """Whether an object of a class from that package is a profiler."""
    read_profile: Callable[[Any], Timeline]
    is_event: Callable[[Mapping[str, Any]], bool]
    """Whether an event of an exported trace has this profiler's form."""
    add_event: Callable[[Timeline, Mapping[str, Any]], None]
    new_timeline: Callable[[], Timeline]

    def accepts(self, profile: Any) -> bool:
        """Return whether `read_profile` reads this object. A user's profiler may derive from the framework's."""
        packages = {base.__module__.partition(".")[0] for base in type(profile).__mro__}
        return self.package in packages and self.is_profile(profile)

"""The plain data that pages about a run start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensortap.core.records import Coverage

__all__ = ["RunFacts", "ran_on"]


@dataclass(frozen=True)
class RunFacts:
    """Everything about a run except its records."""

    path: str
    info: Mapping[str, Any]
    """The contents of run.json."""
    finished: bool
    steps: Sequence[int]
    ranks: Sequence[int]
    records: int
    tensors: int
    """Number of distinct tensors; several records may be of the same one."""
    kept: int
    """Records whose bytes are on disk."""
    bytes_on_disk: int
    notices: Sequence[str] = ()
    coverage: Mapping[int, Sequence[Coverage]] = field(default_factory=dict)
    """By rank."""
    calls: Sequence[tuple[str, str]] = ()
    """Modules that were called with plain arguments, and the arguments in words."""
    mesh: str = ""
    """The axes of the run's processes, in words."""


def ran_on(info: Mapping[str, object]) -> str:
    """Return framework, versions and devices, but nothing that names the machine: pages are pasted into tickets."""
    environment = info.get("environment")
    environment = environment if isinstance(environment, dict) else {}
    versions = environment.get("versions")
    versions = dict(versions) if isinstance(versions, dict) else {}
    framework = str(info.get("framework", ""))
    if framework and framework not in versions:
        versions = {framework: "", **versions}
    parts = [f"{name} {version}".strip() for name, version in versions.items() if version is not None]
    if python := environment.get("python"):
        parts.append(f"Python {python}")
    devices = environment.get("devices")
    if isinstance(devices, list) and devices:
        kinds = {str(device): devices.count(device) for device in devices}
        parts += [f"{n} × {device}" if n > 1 else device for device, n in kinds.items()]
    if platform := str(environment.get("platform", "")):
        parts.append(platform.partition("-")[0])
    return ", ".join(parts)

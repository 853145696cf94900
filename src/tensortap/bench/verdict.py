"""What limits a tap: what each part of the machine would need at least, against what the tap took."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensortap.kernels.cuda.gpu import MOST_TOGETHER

__all__ = ["Floor", "floors", "limit"]

_MOST = 0.5
"""A floor explains what a tap costs if it is at least this share of it."""
_BUSY = 0.9
"""The host holds the device up if launching a step takes at least this share of it."""


@dataclass(frozen=True)
class Floor:
    """The least time a step in which one part of the machine can do its share."""

    name: str
    seconds: float
    beside: bool = False
    """Whether it can run while the step itself does: then the whole step is its time, not what comes on top."""


def floors(keep: str, device: str, nbytes: int, tensors: int, limits: Mapping[str, Any]) -> list[Floor]:
    """For so many bytes in so many tensors a step, the slowest part first."""
    found = []

    def add(name: str, rate: float | None, beside: bool = False) -> None:
        if rate:
            found.append(Floor(name, nbytes / rate, beside))

    if device == "cuda":
        add("reading GPU memory", limits["device_read"])
        launches = math.ceil(tensors / MOST_TOGETHER) if keep == "summary" else tensors
        found.append(Floor("launches", launches * limits["device_launch"]))
    else:
        add("reading memory", limits["memory_read"])
    if keep == "tensors":
        if device == "cuda":
            add("PCIe", limits["device_to_host"], beside=True)
        cached, direct = limits["page_cache_write_many"], limits["direct_write"] or 0.0
        add("the page cache" if cached >= direct else "the disk", max(cached, direct), beside=device == "cuda")
    return sorted(found, key=lambda floor: -floor.seconds)


def limit(seconds: float, plain: float, slowest: Floor, launching: float | None = None) -> dict[str, Any]:
    """In words and numbers: what a tapped step's time went to. `launching` are the host's seconds a step, where it does
    not wait for a device."""
    over = seconds - plain
    whole, said_of = (seconds, "the step") if slowest.beside else (over, "the time over the plain step")
    share = min(1.0, slowest.seconds / whole) if whole > 0 else 1.0
    if over <= 0.01 * plain:
        said = "nothing to speak of: it is within a hundredth of the plain step"
    elif share >= _MOST:
        said = f"{slowest.name}: {share:.0%} of {said_of} is that alone"
    elif launching is not None and launching >= _BUSY * seconds:
        said = f"the host: launching takes {launching / seconds:.0%} of the step, and the device waits for it"
    else:
        said = f"tensortap's own work: even {slowest.name}, the slowest part, needs only {share:.0%} of {said_of}"
    return {"name": slowest.name, "floor_seconds": slowest.seconds, "share": share, "said": said}

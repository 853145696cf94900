"""The limit of a tap: the minimal time of each part of the machine, against the time that the tap took."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensortap.kernels.cuda.gpu import MOST_TOGETHER

__all__ = ["Floor", "floors", "limit"]

_MOST = 0.5
"""A floor explains the cost of a tap if it is at least this share of it."""
_BUSY = 0.9
"""The host is the limit if launching a step takes at least this share of it."""


@dataclass(frozen=True)
class Floor:
    """The minimal time per step of one part of the machine."""

    name: str
    seconds: float
    concurrent: bool = False
    """Whether it runs concurrently with the step: it then has the whole step, not only the time over plain."""


def floors(keep: str, device: str, nbytes: int, tensors: int, limits: Mapping[str, Any]) -> list[Floor]:
    """Return the floors for the bytes and tensors of a step, the slowest part first."""
    found = []

    def add(name: str, rate: float | None, concurrent: bool = False) -> None:
        if rate:
            found.append(Floor(name, nbytes / rate, concurrent))

    if device == "cuda":
        add("reading GPU memory", limits["device_read"])
        launches = math.ceil(tensors / MOST_TOGETHER) if keep == "summary" else tensors
        found.append(Floor("launches", launches * limits["device_launch"]))
    else:
        add("reading memory", limits["memory_read"])
    if keep == "tensors":
        if device == "cuda":
            add("PCIe", limits["device_to_host"], concurrent=True)
        cached, direct = limits["page_cache_write_many"], limits["direct_write"] or 0.0
        add("the page cache" if cached >= direct else "the disk", max(cached, direct), concurrent=device == "cuda")
    return sorted(found, key=lambda floor: -floor.seconds)


def limit(seconds: float, plain: float, slowest: Floor, launching: float | None = None) -> dict[str, Any]:
    """Return the limit of a tapped step, in numbers and in words.

    `launching` is the host's time per step, where the host does not wait for a device.
    """
    over = seconds - plain
    whole, of_what = (seconds, "the step") if slowest.concurrent else (over, "the time over the plain step")
    share = min(1.0, slowest.seconds / whole) if whole > 0 else 1.0
    if over <= 0.01 * plain:
        text = "nothing: it is within a hundredth of the plain step"
    elif share >= _MOST:
        text = f"{slowest.name}: {share:.0%} of {of_what} is spent there"
    elif launching is not None and launching >= _BUSY * seconds:
        text = f"the host: launching takes {launching / seconds:.0%} of the step, and the device waits for it"
    else:
        text = f"tensortap's own work: even {slowest.name}, the slowest part, needs only {share:.0%} of {of_what}"
    return {"name": slowest.name, "floor_seconds": slowest.seconds, "share": share, "said": text}

"""What was spent, by the place it belongs to. Every figure that is shown is a sum over these entries."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

__all__ = ["Entry", "Ledger", "Place", "Spent"]

G = TypeVar("G", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Place:
    """A module in one phase, or something else that takes time, such as the optimizer."""

    module: str
    cls: str
    phase: str


@dataclass(slots=True)
class Entry:
    """Amounts that belong to the innermost of a chain of nested places. Times in nanoseconds, memory in bytes."""

    chain: tuple[Place, ...]
    """From the outermost to the innermost, all of one phase."""
    host: float = 0
    device: float = 0
    memory: float = 0
    device_memory: float = 0


@dataclass(slots=True)
class Spent:
    """What one place spent. Times in microseconds; memory in bytes, as allocated less freed."""

    pieces: int = 0
    """Spans: one a call in forward and recompute; in backward one a graph node, and one for each node of its parts."""
    own: float = 0.0
    """Host time, without the module's parts and without the cost of annotating."""
    total: float = 0.0
    """Host time with the parts; without the cost of annotating, and without recomputation in backward."""
    device_own: float = 0.0
    """Time of the kernels that were launched inside, but not inside a part."""
    device: float = 0.0
    """Time of all kernels that were launched inside."""
    own_memory: float = 0
    memory: float = 0
    device_memory: float = 0

    def __bool__(self) -> bool:
        return bool(self.pieces or self.own or self.device_own or self.memory or self.device_memory)


@dataclass
class Ledger:
    """All entries of one profile."""

    framework: str
    backward_calls: str
    """See `Timeline.backward_calls`."""
    entries: list[Entry]
    calls: dict[Place, int]
    span: float
    """Nanoseconds from the first event of the host to the last."""
    steps: int
    """Training steps: as the profiler counted them, else calls of the optimizer, else of the model; at least 1."""
    kernels: int = 0
    kernel_time: float = 0
    """Nanoseconds of all kernels, each in full even where some overlap."""
    device_busy: float = 0
    """Nanoseconds in which at least one kernel ran, summed over devices."""
    unlinked: int = 0
    """Kernels whose launch is not in the profile."""

    def per_step(self) -> Ledger:
        """The same for one step on average. Calls stay those of the whole profile."""
        share = 1 / self.steps
        entries = [
            replace(
                entry,
                host=entry.host * share,
                device=entry.device * share,
                memory=entry.memory * share,
                device_memory=entry.device_memory * share,
            )
            for entry in self.entries
        ]
        return replace(
            self,
            entries=entries,
            span=self.span * share,
            kernel_time=self.kernel_time * share,
            device_busy=self.device_busy * share,
        )

    def spent(self, group: Callable[[Place], G]) -> dict[G, Spent]:
        """Sum by `group(place)`, in the order of first appearance. A group inside itself is counted once."""
        found: dict[G, Spent] = {}
        for place, count in self.calls.items():
            found.setdefault(group(place), Spent()).pieces += count
        for entry in self.entries:
            groups = dict.fromkeys(group(place) for place in entry.chain)
            own = found.setdefault(group(entry.chain[-1]), Spent())
            own.own += entry.host / 1000
            own.device_own += entry.device / 1000
            own.own_memory += entry.memory
            for spent in _all(found, groups):
                spent.total += entry.host / 1000
                spent.device += entry.device / 1000
                spent.memory += entry.memory
                spent.device_memory += entry.device_memory
        return found


def _all(found: dict[G, Spent], groups: Iterable[G]) -> Iterable[Spent]:
    for group in groups:
        yield found.setdefault(group, Spent())

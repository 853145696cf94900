"""The ledger of a profile: time and memory by owner. Every figure in a report is a sum over its entries."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeVar

__all__ = ["LedgerEntry", "ModulePhase", "TimeLedger", "Usage"]

G = TypeVar("G", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ModulePhase:
    """A module in one phase, or something else that takes time, such as the optimizer."""

    module: str
    cls: str
    phase: str


@dataclass(slots=True)
class LedgerEntry:
    """Amounts that the innermost of a chain of nested modules owns. Times in nanoseconds, memory in bytes."""

    chain: tuple[ModulePhase, ...]
    """From the outermost to the innermost, all of one phase."""
    host: float = 0
    device: float = 0
    memory: float = 0
    device_memory: float = 0


@dataclass(slots=True)
class Usage:
    """Time and memory of a module in one phase. Times in microseconds; memory in bytes, allocated minus freed."""

    pieces: int = 0
    """Spans: one per call in forward and recompute; in backward one per graph node, including those of submodules."""
    own: float = 0.0
    """Host time, without submodules and without the cost of annotating."""
    total: float = 0.0
    """Host time with submodules; without the cost of annotating, and without recomputation in backward."""
    device_own: float = 0.0
    """Time of the kernels launched by the module itself, not by a submodule."""
    device: float = 0.0
    """Time of all kernels launched by the module and its submodules."""
    own_memory: float = 0
    memory: float = 0
    device_memory: float = 0

    def __bool__(self) -> bool:
        return bool(self.pieces or self.own or self.device_own or self.memory or self.device_memory)


@dataclass
class TimeLedger:
    """All entries of one profile."""

    framework: str
    backward_calls: str
    """See `Timeline.backward_calls`."""
    entries: list[LedgerEntry]
    calls: dict[ModulePhase, int]
    span: float
    """Nanoseconds from the first host event to the last."""
    steps: int
    """Training steps as the profiler counted them; else calls of the optimizer, else of the model. At least 1."""
    kernels: int = 0
    kernel_time: float = 0
    """Nanoseconds summed over all kernels, also where they overlap."""
    device_busy: float = 0
    """Nanoseconds in which at least one kernel ran, summed over devices."""
    unlinked: int = 0
    """Number of kernels whose launch is not in the profile."""

    def per_step(self) -> TimeLedger:
        """Return the average over steps. Calls stay those of the whole profile."""
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

    def usage_by(self, group: Callable[[ModulePhase], G]) -> dict[G, Usage]:
        """Return sums by `group(place)`, in the order of first appearance. A group inside itself counts once."""
        found: dict[G, Usage] = {}
        for place, count in self.calls.items():
            found.setdefault(group(place), Usage()).pieces += count
        for entry in self.entries:
            groups = dict.fromkeys(group(place) for place in entry.chain)
            own = found.setdefault(group(entry.chain[-1]), Usage())
            own.own += entry.host / 1000
            own.device_own += entry.device / 1000
            own.own_memory += entry.memory
            for each in groups:
                usage = found.setdefault(each, Usage())
                usage.total += entry.host / 1000
                usage.device += entry.device / 1000
                usage.memory += entry.memory
                usage.device_memory += entry.device_memory
        return found

"""What is measured, for how long and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tensortap.errors import UsageError

__all__ = ["KEEPS", "Options"]

KEEPS = ("summary", "tensors")


@dataclass(frozen=True)
class Options:
    """Nothing here changes what a figure means, only how well it is known and which figures there are."""

    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    model: str | None = None
    """A name of `bench.model.SIZES`; None is the one made for the device."""
    keep: tuple[str, ...] = KEEPS
    rounds: int = 5
    """In each, all ways take their turn; one more before them warms up."""
    steps: int = 4
    """Steps in a row that are timed together, to the last byte."""
    tensor_steps: int = 2
    """The same for whole tensors; fewer where the disk has no room for so many."""
    out: Path | None = None
    """Where runs are written and removed again; None is a temporary folder."""
    habit: bool = False
    """Measure np.save in hooks, too."""
    leak_steps: int = 0
    """Watch the memory over so many steps with summaries."""
    kernel: bool = False
    """Measure the device's summary kernel alone."""
    seconds: float = 240.0
    """After this time no further round begins, and what is left out is told."""

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"device: {self.device!r} is none of auto, cpu, cuda")
        for word in self.keep:
            if word not in KEEPS:
                raise UsageError(f"keep: {word!r} is none of {', '.join(KEEPS)}")
        if not self.keep:
            raise UsageError(f"keep is empty: there are {', '.join(KEEPS)}")
        if min(self.rounds, self.steps, self.tensor_steps) < 1 or self.leak_steps < 0 or self.seconds <= 0:
            raise UsageError("rounds, steps and seconds must be positive, leak_steps not negative")

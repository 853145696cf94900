"""Options of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tensortap.errors import UsageError

__all__ = ["KEEPS", "BenchOptions"]

KEEPS = ("summary", "tensors")


@dataclass(frozen=True)
class BenchOptions:
    """The figures to measure, and their precision. No option changes the meaning of a figure."""

    device: str = "auto"
    """cpu, cuda, or auto: cuda if there is a device."""
    model: str | None = None
    """A name of `bench.model.SIZES`; None means the default of the device."""
    keep: tuple[str, ...] = KEEPS
    rounds: int = 5
    """Rounds in which all ways take turns, after a warm-up."""
    steps: int = 4
    """Steps in a row that are timed together, until the last byte is written."""
    tensor_steps: int = 2
    """The same for whole tensors; fewer if the disk is too small."""
    out: Path | None = None
    """Folder for runs, which are removed again; None means a temporary folder."""
    np_save: bool = False
    """Measure np.save in hooks, too."""
    leak_steps: int = 0
    """Steps with summaries over which memory is observed."""
    kernel: bool = False
    """Measure the device's summary kernel alone."""
    seconds: float = 240.0
    """No further round begins after this time; skipped parts are reported."""

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"device: {self.device!r} is not one of auto, cpu, cuda")
        for word in self.keep:
            if word not in KEEPS:
                raise UsageError(f"keep: {word!r} is not one of {', '.join(KEEPS)}")
        if not self.keep:
            raise UsageError(f"keep is empty: choose from {', '.join(KEEPS)}")
        if min(self.rounds, self.steps, self.tensor_steps) < 1 or self.leak_steps < 0 or self.seconds <= 0:
            raise UsageError("rounds, steps and seconds must be positive, leak_steps not negative")

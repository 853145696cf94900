"""The options of a tap that do not select what it records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tensortap.capture.budget import check_share
from tensortap.capture.incidents.incidents import IncidentOptions
from tensortap.capture.placement.layout import Layout
from tensortap.core.sketches import FULL, check_size
from tensortap.core.urls import Place
from tensortap.errors import UsageError
from tensortap.store.writer.run_writer import RunWriter
from tensortap.store.writer.uploading import UploadingWriter

__all__ = ["TapOptions"]


@dataclass(frozen=True)
class TapOptions:
    """The options of a tap; `Selection` defines what it records."""

    overwrite: bool = False
    on_error: str = "warn"
    compiled: str = "boundary"
    emulate_casts: bool = False
    max_buffer: int | None = None
    gather: bool = True
    max_memory: int | None = None
    sketch: int = FULL
    evaluation: bool = False
    budget: float | None = None
    incidents: IncidentOptions = field(default_factory=IncidentOptions)
    layout: Layout = field(default_factory=Layout)
    upload: Mapping[str, Any] = field(default_factory=dict)
    """Options of `UploadingWriter`, for a run at a URL."""

    def __post_init__(self) -> None:
        if self.compiled not in ("boundary", "inside", "eager"):
            raise UsageError(f'compiled: {self.compiled!r} is not "boundary", "inside" or "eager"')
        if self.emulate_casts and self.compiled != "inside":
            raise UsageError('emulate_casts is for compiled="inside": only taps inside a graph change its rounding')
        check_size(self.sketch)
        if self.budget is not None:
            check_share(self.budget)

    def described(self) -> dict[str, Any]:
        """Return the options that decide what a run holds, for run.json."""
        own = {
            name: getattr(self, name)
            for name in ("compiled", "emulate_casts", "gather", "evaluation", "budget", "sketch")
        }
        return own | asdict(self.incidents)

    def writer(self, path: Place) -> Callable[..., RunWriter]:
        """Return the writer of a folder or a URL. It takes the remaining arguments of `RunWriter`."""
        return partial(RunWriter, path) if isinstance(path, Path) else partial(UploadingWriter, path, **self.upload)

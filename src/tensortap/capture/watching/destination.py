"""The destination of a watcher's tensors, and callbacks for its events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensortap.capture.modules.tree import Site
from tensortap.capture.recording.slots import RecordSlot, SlotTable

__all__ = ["Destination"]


def _nothing(*_: Any) -> None:
    pass


def _not_taken(*_: Any) -> bool:
    return False


@dataclass(slots=True, eq=False)
class Destination:
    """The destination of a watcher's tensors, and callbacks for its events, which do nothing by default."""

    record: Callable[[Any, RecordSlot, int], None]
    """Records a tensor of a step."""
    slots: SlotTable = field(default_factory=SlotTable)
    take: Callable[[Any, RecordSlot, int], bool] = _not_taken
    """Called first for every tensor, with its step; returns whether nothing is left to do."""
    record_gradient: Callable[[Any, RecordSlot, int], None] = _nothing
    """Records a step_grad, unless it is the parameter's param_grad. By default it is recorded as any other tensor."""
    forget: Callable[[Any], None] = _nothing
    """Called with a tensor whose memory was reused; see `Recorder.forget`."""
    code_changed: Callable[[], None] = _nothing
    """Called when other compiled code runs than before."""
    step_begins: Callable[[], None] = _nothing
    """Called before the first call of a step."""
    step_seen: Callable[[Sequence[Site]], None] = _nothing
    """Called with the watched sites after the step's first outermost call."""
    forward_begins: Callable[[], None] = _nothing
    """Called before the first call of a micro step runs."""
    forward_ended: Callable[[], None] = _nothing
    """Called after the root has run."""
    snapshot_begins: Callable[[], None] = _nothing
    """Called before parameters and buffers are recorded."""
    snapshot_ended: Callable[[], None] = _nothing
    """Called after that, before anything else runs."""
    called_with: Callable[[int, int, str, int, Mapping[str, Any]], None] | None = None
    """Called for every call whose plain arguments differ from those of the call before; see `RunWriter.called`."""

    def __post_init__(self) -> None:
        if self.record_gradient is _nothing:
            self.record_gradient = self.record

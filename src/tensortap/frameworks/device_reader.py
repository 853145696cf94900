"""The contract of a device reader, which summarises tensors on their device without waiting for it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tensortap.core.host_copies import DeviceBytes
from tensortap.core.placement import Placement
from tensortap.frameworks.tensor_kind import TensorKind

__all__ = [
    "CollectedSummaries",
    "DeferralBound",
    "DeferralTrial",
    "DeviceReader",
    "NativeReads",
    "SlotPlacement",
    "TensorDescription",
    "TokenHold",
    "VisibleSketches",
]

TensorDescription = tuple[Hashable | None, TensorKind, bool]
"""Identity token, kind, and whether the tensor is flat; see `DeviceReader.describe`."""


class CollectedSummaries(NamedTuple):
    """Summaries that a device computed, one row for each ticket."""

    columns: Mapping[str, npt.NDArray[Any]]
    """The fields of summaries, by name."""
    unchanged: Sequence[bool] | npt.NDArray[np.bool_]
    """Whether the tensor still had the values of the sighting that it was compared with."""
    missed: Collection[int] = ()
    """Rows of deferred tensors that were not read, usually because they had changed. They hold no values."""


class DeferralBound(Protocol):
    """The bound on how long the read of one tensor may be deferred."""

    @property
    def safe_delay(self) -> int:
        """Number of later tensors before which this one is known to be unchanged."""

    def report_changed(self) -> None:
        """Called if the tensor changed before it was read."""


class SlotPlacement:
    """The placement of a slot's tensors, as long as they have the same shape and the batch has its shape."""

    __slots__ = ("base", "batch", "number", "placement", "shape")

    def __init__(
        self,
        placement: Placement | None,
        number: int | None,
        base: int | None,
        shape: tuple[int, ...],
        batch: tuple[int, ...] | None,
    ) -> None:
        self.placement = placement
        """None if it is not known."""
        self.number = number
        """Number of the placement in the run."""
        self.base = base
        """See `DeviceReader.base_of`; 0 if the placement is not known."""
        self.shape = shape
        self.batch = batch
        """The shape of the forward's first input, as the placer holds it."""


class DeferralTrial(Protocol):
    """A test of how long a tensor, which was read at once, could have waited."""

    @property
    def safe_delay(self) -> int:
        """As in `DeferralBound`. The second read is not deferred beyond it."""

    def report_second_read(self, others: int, ticket: Any) -> None:
        """Called when `others` more tensors had come. The ticket is None if the tensor had changed."""


class TokenHold(Protocol):
    """Keeps identity tokens from being reused by other tensors."""

    def add(self, tensor: Any) -> None:
        """Reserve the token of this tensor."""

    def clear(self) -> None:
        """Release all tokens."""


class VisibleSketches(Protocol):
    """Sketches tensors on their device without the positions that a mask hides."""

    def add(self, tensor: Any, hidden: npt.NDArray[np.bool_]) -> int | None:
        """Sketch a tensor with zeros where `hidden`, broadcast to its shape, is true.

        Return the number of the sketch; None if it cannot be made.
        """

    def fetch(self) -> npt.NDArray[np.float32]:
        """Wait for all sketches, and return one for each number."""


class NativeReads(NamedTuple):
    """The parts of a reader that the C code for deferred reads uses."""

    classes: Sequence[type]
    core: Any
    """The framework's module that knows the current device and stream."""
    limits: Sequence[int]
    """The limits in the form that `configure_device` of the C code takes."""


class DeviceReader(Protocol):
    """Reads tensors on their device without waiting for it."""

    lock: AbstractContextManager[Any]
    """Lock held during every method: deferred reads may run on any thread when a backward ends. A caller with its own
    lock sets it here.
    """

    def describe(self, tensor: Any) -> TensorDescription:
        """Return identity token, kind and flatness of the tensor, or of this rank's part of it.

        The token is equal at two sightings of the same unchanged tensor if a `TokenHold` holds it. It is None if the
        framework does not track changes; every sighting must then be read. `submit` takes the flatness.
        """

    def hold_tokens(self) -> TokenHold:
        """Return a new, empty hold."""

    def submit(
        self, tensor: Any, known: Any = None, flat: bool | None = None, placement: Placement | None = None
    ) -> Any:
        """Summarise a tensor, which may be changed or freed right after, and return a ticket.

        `known` is the ticket of an earlier sighting with the same token. A few elements are compared first then, and
        the rest is only read if they differ. `flat` is the flatness from `describe`; None if it was not called. With a
        placement, digest and sketch are made at the positions in the whole.
        """

    def can_place(self, tensor: Any, placement: Placement) -> bool:
        """Return whether `submit` takes this placement of the tensor."""

    def base_of(self, tensor: Any, placement: Placement) -> int | None:
        """Return the row of the whole that the tensor's first row is; None if it cannot be read together with others.

        It can if its elements are also neighbours in the whole, and begin at the start of a row.
        """

    @property
    def native_reads(self) -> NativeReads | None:
        """The objects with which `native/deferred.h` runs deferred reads; None if it cannot."""

    def use(self, native: Any) -> None:
        """Let C code run most deferred reads, after it was configured with `native_reads`."""

    def deferrable(self, tensor: Any, likely: TensorKind | None) -> TensorKind | None:
        """Return the kind of a tensor whose read can be deferred; None if it must be read now.

        A tensor must be read now if it is of a special class, has to be copied first, or is large enough for a launch
        of its own. `likely` is the kind that it probably has.
        """

    def submit_deferred(
        self, tensor: Any, kind: TensorKind, bound: DeferralBound, known: Any, place: SlotPlacement | None = None
    ) -> Any:
        """Variant of `submit` for a tensor that is `deferrable`: it is read later, so that several reads share one
        launch.

        The tensor may be freed meanwhile. If it was changed, it is not read. It is not read either if `known` is given.
        """

    def submit_trial(self, tensor: Any, trial: DeferralTrial, place: SlotPlacement | None = None) -> None:
        """Summarise a tensor again that was just submitted, at the latest point at which a deferred read would happen.

        A tensor whose read cannot be deferred is skipped.
        """

    def flush(self) -> None:
        """Run all deferred reads: the forward, the backward or the step is over."""

    def discard_deferred(self) -> None:
        """Release all deferred tensors without reading them: the recording has stopped."""

    def parts(self, tensor: Any) -> Iterator[DeviceBytes]:
        """Yield the whole tensor in C order.

        Each part must be copied before the next is requested. After the last one the tensor may be changed or freed.
        """

    def end_step(self) -> None:
        """Start to copy the step's summaries to the host. If the device fails after they arrive, they are not lost."""

    def wait(self, tickets: Sequence[Any]) -> None:
        """Wait until the summaries are in host memory, where a failing device cannot affect them. Thread-safe."""

    def collect(self, *tickets: Sequence[Any]) -> CollectedSummaries:
        """Wait for the summaries and return them, once their steps have ended. Thread-safe.

        Each argument has the tickets of one step, with all those that they were compared with.
        """

    def close(self) -> None:
        """Wait for all pending work, and release the memory."""

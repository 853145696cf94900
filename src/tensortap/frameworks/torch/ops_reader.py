"""Summaries by plain torch operations, for devices without a kernel of their own: slower, with the same results.

Everything stays on the device until the step ends. Then one copy fetches all of the step's results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensortap.core.dtypes import edge_of
from tensortap.core.host_copies import DeviceBytes
from tensortap.core.placement import Placement
from tensortap.frameworks.device_reader import (
    CollectedSummaries,
    DeferralBound,
    DeferralTrial,
    NativeReads,
    SlotPlacement,
)
from tensortap.frameworks.tensor_kind import TensorKind
from tensortap.frameworks.torch.memory import StorageHold, describe
from tensortap.frameworks.torch.tensors import NAMES, dense
from tensortap.kernels.cuda.results import RESULT, columns
from tensortap.kernels.summary.reference import BUCKETS, ROW, ROW_SEED, SIGN_SEED, digest_weights, line_hash

__all__ = ["OpsReader", "OpsSketches"]

_ROWS = 1 << 11
"""Rows at a time. Their unpacked values, some tens of megabytes, are all the memory that is needed."""
_SLOTS = 128
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OpsTicket:
    """A row of the step's results."""

    __slots__ = ("elements", "known", "number", "step")

    def __init__(self, step: _StepResults, elements: int, known: OpsTicket | None) -> None:
        self.step = step
        self.number = len(step.rows)
        self.elements = elements
        self.known = known


class _StepResults:
    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []
        self._results: npt.NDArray[Any] | None = None

    def fetch(self) -> None:
        """Copy the results to the host, on the thread and stream that computed them."""
        if self.rows:
            host = np.concatenate([rows.cpu().numpy() for rows in _by_device(self.rows)])
            self._results = host.view(RESULT).reshape(-1)
            self.rows = []

    def results(self) -> npt.NDArray[Any]:
        assert self._results is not None
        return self._results


def _by_device(rows: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield neighbouring rows of one device together: usually all of them, in one copy."""
    start = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at].device != rows[start].device:
            yield torch.stack(rows[start:at])
            start = at


class OpsReader:
    """A reader for any device with float64."""

    describe = staticmethod(describe)
    hold_tokens = StorageHold
    native_reads: NativeReads | None = None

    def __init__(self) -> None:
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self._step = _StepResults()

    def submit(
        self,
        tensor: torch.Tensor,
        known: OpsTicket | None = None,
        flat: bool | None = None,
        placement: Placement | None = None,
    ) -> OpsTicket:
        assert placement is None, "`can_place` comes first"
        tensor = tensor.detach()
        tensor = dense(tensor)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        elements = tensor.resolve_neg().reshape(-1)
        ticket = OpsTicket(self._step, elements.numel(), known)
        self._step.rows.append(_result(elements))
        return ticket

    def can_place(self, tensor: torch.Tensor, placement: Placement) -> bool:
        """Return False: a part of a whole is copied to the host."""
        return False

    def base_of(self, tensor: torch.Tensor, placement: Placement) -> int | None:
        return None

    def submit_trial(self, tensor: torch.Tensor, trial: DeferralTrial, place: SlotPlacement | None = None) -> None:
        """Do nothing: no read is deferred."""

    def deferrable(self, tensor: torch.Tensor, likely: TensorKind | None) -> TensorKind | None:
        return None

    def submit_deferred(
        self,
        tensor: torch.Tensor,
        kind: TensorKind,
        bound: DeferralBound,
        known: OpsTicket | None,
        place: SlotPlacement | None = None,
    ) -> OpsTicket:
        return self.submit(tensor, known)

    def use(self, native: Any) -> None:
        """Do nothing: no read is deferred."""

    def flush(self) -> None:
        """Do nothing: no read is deferred."""

    def discard_deferred(self) -> None:
        """Do nothing: no tensor is held."""

    def parts(self, tensor: torch.Tensor) -> Iterator[DeviceBytes]:
        host = dense(tensor.detach()).cpu().resolve_conj().resolve_neg().contiguous()
        if host.numel():
            yield _HostPart(host.view(-1).view(torch.uint8).numpy())

    def end_step(self) -> None:
        self._step.fetch()
        self._step = _StepResults()

    def wait(self, tickets: Sequence[OpsTicket]) -> None:
        """Do nothing: the end of the step has waited."""

    def collect(self, *groups: Sequence[OpsTicket]) -> CollectedSummaries:
        tickets = [ticket for group in groups for ticket in group]
        results = np.array([ticket.step.results()[ticket.number] for ticket in tickets], RESULT)
        unchanged = [
            ticket.known is not None and ticket.known.step.results()[ticket.known.number]["digest"] == result["digest"]
            for ticket, result in zip(tickets, results, strict=True)
        ]
        elements = np.array([ticket.elements for ticket in tickets], np.int64)
        return CollectedSummaries(columns(results, elements), unchanged)

    def close(self) -> None:
        self._step = _StepResults()


class OpsSketches:
    """Sketches of tensors on any device without hidden positions. Implements `VisibleSketches`.

    No kernel of a lane reads them: lanes count tensors, to determine how long others may wait.
    """

    def __init__(self) -> None:
        self._reader = OpsReader()
        self._tickets: list[OpsTicket] = []

    def add(self, tensor: torch.Tensor, hidden: npt.NDArray[np.bool_]) -> int | None:
        if tensor.dtype is torch.bool or tensor.is_complex():
            return None
        with torch.no_grad():
            where = torch.from_numpy(np.ascontiguousarray(hidden)).to(tensor.device)
            self._tickets.append(self._reader.submit(dense(tensor.detach()).masked_fill(where, 0)))
        return len(self._tickets) - 1

    def fetch(self) -> npt.NDArray[np.float32]:
        self._reader.end_step()
        sketches: npt.NDArray[np.float32] = self._reader.collect(self._tickets).columns["sketch"]
        return sketches


class _HostPart:
    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self.size = array.size
        self._array = array

    def copy(self, target: npt.NDArray[np.uint8], start: int) -> Callable[[], None]:
        target[:] = self._array[start : start + target.size]
        return lambda: None


def _result(flat: torch.Tensor) -> torch.Tensor:
    """Return one row of results, as 64-bit words."""
    device, n = flat.device, flat.numel()
    bits = flat.view(_BITS[flat.element_size()]) if flat.dtype != torch.bool else flat.view(torch.uint8)
    about = _as_double(flat[:1])
    about = (
        torch.where(about.abs() < edge_of(NAMES.get(flat.dtype, "")), about, 0.0).sum()
        if n
        else torch.zeros((), dtype=torch.float64, device=device)
    )
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    low, high = (
        torch.full((), torch.inf, dtype=torch.float64, device=device),
        torch.full((), -torch.inf, dtype=torch.float64, device=device),
    )
    counts = torch.zeros(6, dtype=torch.int64, device=device)
    edge = edge_of(NAMES.get(flat.dtype, ""))
    slots = torch.zeros((_SLOTS, 8), dtype=torch.float64, device=device)
    for first in range(0, n, _ROWS * ROW):
        span = slice(first, min(n, first + _ROWS * ROW))
        x = _as_double(flat[span])
        finite = torch.isfinite(x)
        ordinary = finite & (x.abs() < edge)
        value = torch.where(ordinary, x, 0.0)
        apart = torch.where(ordinary, x - about, 0.0)
        sums += torch.stack([apart.sum(), apart.square().sum(), value.abs().sum()])
        low = torch.minimum(low, torch.where(finite, x, torch.inf).amin())
        high = torch.maximum(high, torch.where(finite, x, -torch.inf).amax())
        digest = _digest(bits[span], first // ROW)
        found = [digest, torch.isnan(x).sum(), (x == torch.inf).sum(), (x == -torch.inf).sum(), (x == 0).sum()]
        counts += torch.stack([*found, (finite & ~ordinary).sum()])
        slots += _slots(torch.where(x.abs() >= edge, x.sign(), value), first // ROW)
    # Bucket b gets element j of slot (b - 29 j) / 2: every second j.
    bucket, j = torch.arange(BUCKETS, device=device)[:, None], 2 * torch.arange(4, device=device)[None, :]
    j = j + bucket % 2
    sketch = slots[((bucket - 29 * j) % 256) // 2, j].sum(1)
    words = [
        sketch.to(torch.float32).view(torch.int64),
        torch.stack([about, *sums, low, high]).view(torch.int64),
        counts,
    ]
    return torch.cat([*words, torch.zeros(1, dtype=torch.int64, device=device)])


def _as_double(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.uint64:  # torch converts it as if it were signed
        signed = values.view(torch.int64)
        return torch.where(signed < 0, ((signed >> 1) & (2**63 - 1) | signed & 1).double() * 2, signed.double())
    return values.to(torch.float64)


def _digest(bits: torch.Tensor, first_row: int) -> torch.Tensor:
    """int64 arithmetic wraps, as the definition wants it."""
    width = bits.element_size()
    rows = -(-bits.numel() // ROW)
    words = _words(bits)
    padded = torch.nn.functional.pad(words, (0, rows * ROW * width // 4 - words.numel()))
    lines = _in_slots(padded.view(rows, _SLOTS, 2 * width), first_row).view(rows * width, 256)
    numbers = np.arange(first_row * width, (first_row + rows) * width, dtype=np.uint64)
    with np.errstate(over="ignore"):
        hashes = torch.from_numpy(line_hash(numbers).view(np.int64)).to(bits.device)
    return ((lines * _weights(bits.device)).sum(1) * hashes).sum()


def _in_slots(groups: torch.Tensor, first_row: int) -> torch.Tensor:
    """Return the groups of each row in their slots."""
    rows, _, size = groups.shape
    row = torch.arange(first_row, first_row + rows, device=groups.device)
    turn = (_hash(row, ROW_SEED) & (_SLOTS - 1))[:, None]
    group = torch.arange(_SLOTS, device=groups.device) ^ turn  # the group in each slot
    return groups.gather(1, group[:, :, None].expand(-1, -1, size))


@cache
def _weights(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(digest_weights().astype(np.int64)).to(device)


def _words(bits: torch.Tensor) -> torch.Tensor:
    """Return little-endian 32-bit words as int64, from elements of any width."""
    width = bits.element_size()
    if width == 8:
        return torch.stack([bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF], 1).view(-1)
    if width == 4:
        return bits.long() & 0xFFFFFFFF
    each = 4 // width
    padded = torch.nn.functional.pad(bits.long() & (256**width - 1), (0, -bits.numel() % each)).view(-1, each)
    shifts = torch.arange(each, device=bits.device) * (8 * width)
    return (padded << shifts).sum(1)


def _slots(values: torch.Tensor, first_row: int) -> torch.Tensor:
    """Return signed values, summed by slot and position in the group."""
    rows = -(-values.numel() // ROW)
    groups = torch.nn.functional.pad(values, (0, rows * ROW - values.numel())).view(rows, _SLOTS, 8)
    row = torch.arange(first_row, first_row + rows, device=values.device)[:, None]
    signs = _hash(row // 4 * _SLOTS + torch.arange(_SLOTS, device=values.device), SIGN_SEED) >> (8 * (row % 4))
    minus = (signs[:, :, None] >> torch.arange(8, device=values.device)) & 1
    moved = _in_slots(groups, first_row)
    return torch.where(minus == 1, -moved, moved).sum(0)


def _hash(x: torch.Tensor, seed: int) -> torch.Tensor:
    return _mix((x & 0xFFFFFFFF) ^ _mix(x >> 32) ^ seed)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Mix with 32-bit arithmetic in int64: a product of two 32-bit numbers wraps, but its low half is right."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)

"""Pairs of tensors measured by torch operations on any torch device: the records of `kernels.pairs`.

Every number is computed in float64. Finite values, the usual case, take a short path that is bound by memory bandwidth.
Only if the moments are not finite is a piece measured again, with non-finite values separated. Only the record leaves
the device, and nothing waits for it before it is requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tensortap.core import dtypes
from tensortap.errors import UsageError
from tensortap.kernels.pairs import ulps
from tensortap.kernels.pairs.cpu import FIELDS, PLACES
from tensortap.kernels.pairs.device import PairPiece
from tensortap.kernels.pairs.reference import part_name

__all__ = ["TorchPairs", "gpu_pairs"]

# Dtypes that torch cannot compute with are read as signed ones of the same width, and corrected afterwards.
_READ_AS = {name: getattr(torch, name) for name in dtypes.NAMES if "complex" not in name and "uint" not in name}
_READ_AS |= {"bool": torch.uint8, "uint8": torch.uint8, "uint16": torch.int16, "uint32": torch.int32}
_READ_AS |= {"uint64": torch.int64}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW = 0xFFFFFFFF
_MOMENTS = ("r_mean", "r_m2", "c_mean", "c_m2")

Values = dict[str, Tensor]


def gpu_pairs(name: str) -> TorchPairs:
    """Return the GPU with a name like "cuda" or "cuda:1"."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("cpu")
    if device.type != "cuda":
        raise UsageError(f'device={name!r} is unknown: give "cpu", or "cuda" or "cuda:1" for a GPU')
    if not torch.cuda.is_available():
        raise UsageError(f"device={name!r}: torch finds no GPU here; leave the device out to compare on the CPU")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise UsageError(f"device={name!r}: there are only {torch.cuda.device_count()} GPUs, counted from 0")
    return TorchPairs(device)


class TorchPairs:
    """A torch device. The CPU works, too: slower than the compiled kernel, but useful in tests."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def slot(self, nbytes: int) -> TorchSlot:
        return TorchSlot(self._device, nbytes)


class TorchSlot:
    """Memory on host and device, and a stream, so that one slot is copied while another is measured."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._gpu = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if self._gpu else None
        with _enough_memory(device), self._own_stream():  # memory belongs to the stream on which it is allocated
            self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._gpu)
            self._on_device = torch.empty(nbytes, dtype=torch.uint8, device=device) if self._gpu else self._host
            self._found = torch.empty(len(PLACES), dtype=torch.float64, pin_memory=self._gpu)
        self._piece: PairPiece | None = None
        self._names: list[str] = []
        self.memory = memoryview(self._host.numpy())

    def start(self, piece: PairPiece) -> None:
        self._piece = piece
        with _enough_memory(self._device), self._own_stream():
            if self._gpu:
                end = piece.spans[1].stop
                self._on_device[:end].copy_(self._host[:end], non_blocking=True)
            self._measure(piece, finite=True)

    def record(self) -> npt.NDArray[np.float64]:
        piece = self._piece
        assert piece is not None
        found = self._values()
        if not all(np.isfinite(found[name]) for name in _MOMENTS):
            with _enough_memory(self._device), self._own_stream():
                self._measure(piece, finite=False)
            found = self._values()
        found.setdefault("unlike", float(found["top"] > 0 or found.get("wrong", 0) > 0))
        found["elements"] = piece.elements * piece.format.components
        found["start"] = piece.start * piece.format.components
        found["line"], found["floor2"] = max(piece.rows.length, 1), piece.rows.floor2
        for name in ("top_at", "wrong_at"):
            found[name] = found.get(name, 0.0) + found["start"]
        record = np.zeros((1, FIELDS))
        for name, value in found.items():
            record[0, PLACES[name]] = value
        return record

    def _own_stream(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _values(self) -> dict[str, float]:
        if self._stream is not None:
            self._stream.synchronize()
        return dict(zip(self._names, self._found[: len(self._names)].tolist(), strict=True))

    def _measure(self, piece: PairPiece, finite: bool) -> None:
        with torch.no_grad():
            reference, candidate = piece.spans
            values = _measure(self._on_device[reference], self._on_device[candidate], piece, finite)
        self._names = list(values)
        together = torch.stack([value.to(torch.float64).reshape(()) for value in values.values()])
        self._found[: len(values)].copy_(together, non_blocking=True)


@contextmanager
def _enough_memory(device: torch.device) -> Iterator[None]:
    """Raise UsageError with advice if the device is out of memory."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise UsageError(
            f"{device} has too little free memory to compare on it; leave the device out to use the CPU"
        ) from error


def _measure(r_raw: Tensor, c_raw: Tensor, piece: PairPiece, finite: bool) -> Values:
    names = tuple(part_name(dtypes.numpy_dtype(name)) for name in (piece.reference, piece.candidate))
    pair = piece.format
    rtol, atol = pair.allowed(piece.rtol, piece.atol)
    r, c = _numbers(r_raw, names[0]), _numbers(c_raw, names[1])
    values: Values = {}
    both: Tensor | None = None
    if finite:
        for side, x in (("r", r), ("c", c)):
            values |= _moments(side, x)
    else:
        for side, x in (("r", r), ("c", c)):
            values |= _counts(side, x) | _moments(side, x[torch.isfinite(x)])
        both = torch.isfinite(r) & torch.isfinite(c)
        values |= _wrong(r, c, both)
        r, c = torch.where(both, r, 0.0), torch.where(both, c, 0.0)
    if all(name in ("int64", "uint64") for name in names):
        gap = _integer_gap(r_raw, c_raw, names)
    else:
        gap = (c - r).abs_()
    at = gap.argmax().reshape(1)
    top = gap.index_select(0, at)
    values |= {
        "gap2": gap.dot(gap),
        "r2": r.dot(r),
        "c2": c.dot(c),
        "dot": r.dot(c),
        "outside": (gap > r.abs().mul_(rtol).add_(atol)).sum(),
        "top": top,
        "top_at": at,
        "top_r": r.index_select(0, at),
        "top_c": c.index_select(0, at),
        "ulp": top if pair.unit[0] == ulps.INTEGERS else _most_steps(r_raw, c_raw, r, c, pair.unit, both),
    }
    if pair.same:
        bits = _BITS[_READ_AS[names[0]].itemsize]
        values["unlike"] = (r_raw.view(bits) != c_raw.view(bits)).any()
    return values | _rows(gap, r, piece)


# --- elements as numbers -------------------------------------------------------------------------------------------
def _numbers(raw: Tensor, name: str) -> Tensor:
    """Return the elements as float64, rounded at most once."""
    x = raw.view(_READ_AS[name])
    if name == "uint64":
        high, low = _halves(x, signed=False)
        return high.to(torch.float64).mul_(2.0**32).add_(low)
    if name in ("uint16", "uint32"):
        return (x.to(torch.int64) & (0xFFFF if name == "uint16" else _LOW)).to(torch.float64)
    if name.startswith("float8"):
        x = x.to(torch.float32)
    return x.to(torch.float64)


def _halves(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return 64-bit integers as high * 2**32 + low. Differences of halves are exact, also as float64."""
    return x >> 32 if signed else (x >> 32) & _LOW, x & _LOW


def _apart(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    high, low = (b - a for a, b in zip(left, right, strict=True))
    return high.to(torch.float64).mul_(2.0**32).add_(low).abs_()


def _integer_gap(r_raw: Tensor, c_raw: Tensor, names: tuple[str, ...]) -> Tensor:
    r, c = (_halves(raw.view(torch.int64), name == "int64") for raw, name in zip((r_raw, c_raw), names, strict=True))
    return _apart(r, c)


# --- one side ----------------------------------------------------------------------------------------------
def _moments(side: str, x: Tensor) -> Values:
    if not x.numel():
        zero = torch.zeros((), dtype=torch.float64, device=x.device)
        return dict.fromkeys((f"{side}_n", f"{side}_mean", f"{side}_m2"), zero)
    variance, mean = torch.var_mean(x, correction=0)
    return {
        f"{side}_n": torch.full_like(mean, x.numel()),
        f"{side}_mean": mean,
        f"{side}_m2": variance * x.numel(),
    }


def _counts(side: str, x: Tensor) -> Values:
    kinds = {"nan": torch.isnan(x), "posinf": torch.isposinf(x), "neginf": torch.isneginf(x)}
    return {f"{side}_{name}": found.sum() for name, found in kinds.items()}


def _wrong(r: Tensor, c: Tensor, both: Tensor) -> Values:
    """Return the number and the first position of elements on whose non-finite values the sides disagree."""
    wrong = ~both & (r != c) & ~(torch.isnan(r) & torch.isnan(c))
    at = wrong.to(torch.uint8).argmax().reshape(1)
    return {
        "wrong": wrong.sum(),
        "wrong_at": at,
        "wrong_r": r.index_select(0, at),
        "wrong_c": c.index_select(0, at),
    }


# --- units in the last place ---------------------------------------------------------------------------------------
def _most_steps(
    r_raw: Tensor, c_raw: Tensor, r: Tensor, c: Tensor, unit: tuple[int, int, int], both: Tensor | None
) -> Tensor:
    mode, digits, lowest = unit
    if mode == ulps.ROUNDED:
        steps = (_ordinals(c, digits, lowest) - _ordinals(r, digits, lowest)).abs_()
    elif mode == ulps.WIDE_BITS or r_raw.numel() == 8 * r.numel():
        places = [_places(x.view(torch.int64)) for x in (r, c)]
        steps = _apart(_halves(places[0], signed=True), _halves(places[1], signed=True))
    else:
        bits = _BITS[r_raw.numel() // r.numel()]
        wide = torch.int32 if bits.itemsize < 4 else torch.int64
        places = [_places(raw.view(bits)).to(wide) for raw in (r_raw, c_raw)]
        steps = (places[1] - places[0]).abs_()
    return (steps if both is None else torch.where(both, steps, 0)).max()


def _places(bits: Tensor) -> Tensor:
    """Return the ordinal of each element in its float type, from its bits; 0 and -0 are number 0."""
    sign = bits >> (8 * bits.itemsize - 1)
    return (bits & torch.iinfo(bits.dtype).max).bitwise_xor_(sign).sub_(sign)


def _ordinals(x: Tensor, digits: int, lowest: int) -> Tensor:
    """Return the ordinal of each rounded element in a shorter float type, with unbounded exponents."""
    bits = x.view(torch.int64) & torch.iinfo(torch.int64).max
    exponent = ((bits >> 52) - 1023).clamp_(min=lowest)
    scale = ((digits + 1023 - exponent) << 52).view(torch.float64)
    number = (bits.view(torch.float64) * scale).round_()
    number += ((exponent - lowest) << digits).to(torch.float64)
    return torch.where(x < 0, -number, number)


# --- rows ----------------------------------------------------------------------------------------------------------
def _rows(gap: Tensor, r: Tensor, piece: PairPiece) -> Values:
    """Return the worst row that is complete in the piece, and both sums of the rows that are cut."""
    length, n, start = max(piece.rows.length, 1), gap.numel(), piece.start * piece.format.components
    within = start % length
    head = min(length - within, n) if within else 0
    ends = within + n >= length
    whole = (n - head) // length
    values: Values = {}
    if head:
        values |= _sums("head" if ends else "open", gap[:head], r[:head])
    if rest := n - head - whole * length:
        values |= _sums("open", gap[n - rest :], r[n - rest :])
    if whole:
        lines = slice(head, head + whole * length)
        off2, size2 = (torch.linalg.vector_norm(x[lines].view(whole, length), dim=1).square_() for x in (gap, r))
        errors2 = torch.where(off2 > 0, off2 / size2.clamp_(min=piece.rows.floor2), 0.0)
        at = errors2.argmax().reshape(1)
        values |= {"worst": errors2.index_select(0, at), "worst_at": at + (start + head) // length}
    return values


def _sums(name: str, gap: Tensor, r: Tensor) -> Values:
    return {f"{name}_gap2": gap.dot(gap), f"{name}_size2": r.dot(r)}

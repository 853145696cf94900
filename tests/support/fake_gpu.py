"""A GPU without one: the real lanes and device readers on CPU tensors, which are read at the moment of a launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensortap.capture import native_classes
from tensortap.core.host_copies import DeviceBytes
from tensortap.core.placement import Placement
from tensortap.frameworks.device_reader import DeferralTrial, SlotPlacement
from tensortap.frameworks.torch.access import access_build
from tensortap.frameworks.torch.cuda import lane as torch_lane
from tensortap.frameworks.torch.cuda import results as torch_results
from tensortap.frameworks.torch.cuda.lane import Lane
from tensortap.frameworks.torch.cuda.reader import CudaReader
from tensortap.frameworks.torch.framework import Torch
from tensortap.frameworks.torch.ops_reader import OpsReader
from tensortap.kernels import summarize
from tensortap.kernels.cuda import gpu as cuda_gpu
from tensortap.kernels.cuda.driver import Parameter
from tensortap.kernels.cuda.gpu import MOST_TOGETHER, PENDING, BatchRead, PieceCounters
from tensortap.kernels.cuda.layout import Layout
from tensortap.kernels.cuda.parts import Part
from tensortap.kernels.cuda.results import RESULT
from tensortap.kernels.cuda.variants import MOST_FINISHED
from tensortap.kernels.summary.reference import BUCKETS, ROW, digest_weights

ITEMS = {"float32": 4, "float64": 8, "int64": 8}
WORKS, WORK, PLACED_WORK = struct.Struct("<QII2Q"), struct.Struct("<5Q4I"), struct.Struct("<5Q6I")
"""The parameter of a kernel that reads several tensors: what comes first, then a work for each of them."""


class FakeGpu:
    """Stands in for `kernels.gpu.Gpu`. It reads contiguous memory, and computes only digests."""

    def __init__(self) -> None:
        self.alone = 0
        self.together_: list[int] = []
        """How many tensors each launch read."""

    def plan(
        self, dtype: str, elements: int, layout: Layout, *, weights: int, turns: PieceCounters, stream: int
    ) -> FakePlan:
        assert layout.code == 0, "only tensors that lie contiguously can be read here"
        return FakePlan(self, dtype, elements)

    def plan_part(self, dtype: str, part: Part, *, weights: int, turns: PieceCounters, stream: int) -> FakePlan:
        if part.base >= 0:
            return FakePlan(self, dtype, part.elements, part.base * ROW)
        (run,) = part.boxes
        assert not run.sizes and not run.offset, "only parts that are one run can be read here"
        return FakePlan(self, dtype, part.elements, run.position)

    def together(
        self, dtype: str, placed: bool = False, *, weights: int, turns: PieceCounters, stream: int
    ) -> BatchRead:
        kernel: Any = FakeKernel(self, dtype, placed)
        return BatchRead(kernel, 264, placed, weights=weights, turns=turns, stream=stream)

    def finish(self, pending: bytearray, partials: int, results: int, stream: int) -> None:
        assert 0 < len(pending) <= PENDING.size * MOST_FINISHED


class FakePlan:
    pieces = 1

    def __init__(self, gpu: FakeGpu, dtype: str, elements: int, start: int = 0) -> None:
        self._gpu, self._dtype, self._elements, self._start = gpu, dtype, elements, start

    def read(self, address: int, partials: int, result: int, known: int = 0) -> None:
        self._gpu.alone += 1
        summary = summary_at(address, self._elements, self._dtype, self._start)
        found = result_at(result)
        found["unchanged"] = bool(known) and result_at(known)["probe"][0] == int(summary.digest) % 2**32
        write(found, summary)


class FakeKernel:
    """Stands in for the kernel of a `BatchRead`, whose parameter it decodes."""

    def __init__(self, gpu: FakeGpu, dtype: str, placed: bool) -> None:
        self._gpu, self._dtype, self._work = gpu, dtype, PLACED_WORK if placed else WORK

    def prepared(self, blocks: int, parameter: Parameter, stream: int) -> Callable[[], None]:
        return lambda: self._launch(parameter.memory.raw)

    def _launch(self, memory: bytes) -> None:
        _, count, pieces, *_ = WORKS.unpack_from(memory)
        assert 0 < count <= MOST_TOGETHER
        self._gpu.together_.append(count)
        works = list(self._work.iter_unpack(memory[WORKS.size : WORKS.size + count * self._work.size]))
        assert pieces == sum(work[5] for work in works), "every piece is read once"
        assert [work[8] for work in works] == [sum(work[5] for work in works[:at]) for at in range(count)]
        for address, _, probe, _, elements, _, _, _, _, *base in works:
            found = result_at(probe - RESULT.fields["probe"][1])
            found["unchanged"] = False
            write(found, summary_at(address, elements, self._dtype, base[0] * ROW if base else 0))


def summary_at(address: int, elements: int, dtype: str, start: int = 0) -> Any:
    """Return the summary of elements in memory, the first of which is at this position of a whole."""
    array = np.frombuffer(ctypes.string_at(address, elements * ITEMS[dtype]), dtype)
    placement = Placement.of_block((start + elements,), (start,), (elements,)) if start else None
    return summarize(array, placement=placement)


def result_at(address: int) -> Any:
    return np.frombuffer((ctypes.c_char * RESULT.itemsize).from_address(address), RESULT)


def write(found: Any, summary: Any) -> None:
    """Write the digest and the counts of NaN and Inf; all else is zero."""
    found["probe"] = int(summary.digest) % 2**32
    if not found["unchanged"][0]:
        found["digest"] = int(summary.digest)
        for name in ("nan", "posinf", "neginf"):
            found[name] = getattr(summary, name)
        for name in ("about", "sum", "squares", "l1", "low", "high", "zeros", "edge"):
            found[name] = 0
        found["sketch"] = np.zeros(BUCKETS, np.float32)


class FakeEvent:
    cuda_event = 0

    def __init__(self, **options: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeReader(CudaReader):
    def __init__(self, gpu: Any = None) -> None:
        super().__init__()
        self.gpu = gpu or FakeGpu()
        self.tried = self._at_once = 0
        """Number of tensors that were read twice, and at once."""
        self._opened: list[Lane] = []
        self.free = 0
        """Bytes of memory that nothing has taken."""

    @property
    def waited(self) -> int:
        """Number of tensors that were deferred."""
        return sum(lane._waiting.came for lane in self._opened) - self._at_once

    def submit(self, *args: Any, **options: Any) -> Any:
        self._at_once += 1
        return super().submit(*args, **options)

    def submit_trial(self, tensor: torch.Tensor, trial: DeferralTrial, place: SlotPlacement | None = None) -> None:
        self.tried += 1
        super().submit_trial(tensor, trial, place)

    def parts(self, tensor: torch.Tensor) -> Iterator[DeviceBytes]:
        return OpsReader().parts(tensor)

    def _open_lane(self, index: int, stream: int) -> Lane:
        weights = torch.from_numpy(digest_weights().view(np.int32))
        self._gpus[index] = self.gpu, weights
        self._opened.append(Lane(self.gpu, weights, torch.device("cpu"), stream, memory=64 << 30, free=self.free))

        return self._opened[-1]

    def _free_memory(self, index: int) -> int:
        return self.free

    def waiting(self) -> int:
        """Tensors that are held, to be read or read again."""
        return sum(len(lane._waiting) + len(lane._trials) for lane in self._lanes.values())


def no_context(*_: Any) -> Any:
    return nullcontext()


def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[], FakeReader]:
    """Place all tensors on the fake GPU from now on. Return a function that makes a new one."""
    made: list[FakeReader] = []

    def new() -> FakeReader:
        made.append(FakeReader())
        return made[-1]

    new()
    monkeypatch.setattr(Torch, "device_reader", lambda self, tensor: made[-1])
    for module in (torch_lane, torch_results):
        monkeypatch.setattr(module, "new_host", lambda: torch.empty(1024 * RESULT.itemsize, dtype=torch.uint8))
    monkeypatch.setattr(torch_lane, "_stream", no_context)
    monkeypatch.setattr(torch_results.driver, "allow_captures", lambda: None)
    monkeypatch.setattr(torch_results.driver, "has_happened", lambda event: True)
    monkeypatch.setattr(cuda_gpu, "clear", lambda address, count, stream: None)
    monkeypatch.setattr(torch.cuda, "stream", no_context)
    monkeypatch.setattr(torch.cuda, "device", no_context)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    capture(monkeypatch, False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    return new


def capture(monkeypatch: pytest.MonkeyPatch, now: bool) -> None:
    """Begin or end the capture of a CUDA graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: now, raising=False)


def choose_language(monkeypatch: pytest.MonkeyPatch, language: str) -> None:
    """Take the quick ways of capture that are written in Python, in C, or in C with torch's own answers (C++)."""
    if language == "Python":
        monkeypatch.setattr(native_classes, "load", lambda: None)
        return
    if (native := native_classes.load()) is None:
        pytest.skip("no C compiler, or no headers of Python")
    if language == "C":
        monkeypatch.setattr(Torch, "tensor_access", staticmethod(lambda: (None, False)))
        native.configure_access(None, ())
    else:
        access_build().build_now()
        if access_build().module() is None:
            pytest.skip("no C++ compiler, or no headers of torch")


@contextmanager
def window(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> Iterator[None]:
    """How many bytes a tensor may wait for."""
    with monkeypatch.context() as changed:
        changed.setattr(torch_lane, "_MOST_WAITING", nbytes)
        yield


class Forever:
    """A bound that never ends."""

    safe_delay = 1 << 60

    def report_changed(self) -> None:
        pass


class Blocks(nn.Module):
    """Changes half of the outputs in place."""

    def __init__(self, count: int, change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self._change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts):
            x = torch.tanh(self._change(number, part(x)))
        return x


def nothing(number: int, x: torch.Tensor) -> torch.Tensor:
    return x

"""The GPU's kernels against the definition: counts, digests and extremes equal, the rest within rounding.

They run on a GPU where there is one, and everywhere on the CPU, from the same source.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from support import cuda_on_cpu
from support.fake_gpu import Forever
from tensortap.core.records import Summary
from tensortap.frameworks.torch.cuda import lane as torch_lane
from tensortap.frameworks.torch.cuda.reader import CudaReader
from tensortap.frameworks.torch.framework import Torch
from tensortap.frameworks.torch.ops_reader import OpsReader
from tensortap.kernels import summarize
from tensortap.kernels.cuda import gpu
from tensortap.kernels.cuda.layout import FLAT, Layout, lay_out
from tensortap.kernels.summary import reference

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
WHOLES = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
SHAPES = [(), (0,), (1,), (7,), (8,), (1023,), (1024,), (1025,), (33, 77), (5, 1024, 64), (3, 5, 7, 11)]


Make = Callable[[], tuple[Any, str]]
"""Gives a device_reader, and the device that its tensors are on."""
ON_GPU = pytest.param(
    "gpu", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
FROM_SOURCE = pytest.param(
    "source", marks=pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="needs g++, which compiles the kernels")
)


@pytest.fixture(params=[ON_GPU, FROM_SOURCE])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return maker(request.param, monkeypatch)


@pytest.fixture(params=[ON_GPU, FROM_SOURCE, "ops"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return maker(request.param, monkeypatch)


def maker(kind: str, monkeypatch: pytest.MonkeyPatch) -> Make:
    if kind == "source":
        return lambda: (cuda_on_cpu.device_reader(monkeypatch), "cpu")
    return lambda: (CudaReader(), "cuda") if kind == "gpu" else (OpsReader(), "cpu")


def summary_of(device_reader: Any, tensor: torch.Tensor) -> Summary:
    ticket = device_reader.submit(tensor)
    device_reader.end_step()
    columns, *_ = device_reader.collect([ticket])
    return Summary(**{name: column[0] for name, column in columns.items()})


def check(device_reader: Any, tensor: torch.Tensor) -> None:
    agree(summary_of(device_reader, tensor), reference.summarize(Torch().host(tensor)))


def agree(found: Summary, true: Summary) -> None:
    for name in ("elements", "nan", "posinf", "neginf", "zeros", "digest"):
        assert getattr(found, name) == getattr(true, name), name
    for name in ("min", "max"):
        assert same(getattr(found, name), getattr(true, name)), name
    for name, scale in (("mean", max(abs(true.mean), true.std)), ("std", true.std), ("l1", true.l1), ("l2", true.l2)):
        ours, theirs = getattr(found, name), getattr(true, name)
        assert same(ours, theirs) or abs(ours - theirs) <= 2e-6 * scale, (name, ours, theirs)
    size = float(np.sqrt(np.mean(np.square(true.sketch, dtype=np.float64))))
    if math.isfinite(size):
        np.testing.assert_allclose(found.sketch, true.sketch, rtol=2e-6, atol=2e-6 * size)


def same(a: float, b: float) -> bool:
    return bool(a == b) or (math.isnan(a) and math.isnan(b))


def random(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)
    return (3 * numbers).to(dtype).to(device)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(make: Make, dtype: torch.dtype) -> None:
    device_reader, device = make()
    for shape in SHAPES:
        check(device_reader, random(shape, device, dtype))


@pytest.mark.parametrize("dtype", [*WHOLES, torch.bool])
def test_whole_numbers(make: Make, dtype: torch.dtype) -> None:
    device_reader, device = make()
    for count in (1, 1000, 3 * 1024 + 5):
        numbers = torch.randint(0, 100, (count,), generator=torch.Generator().manual_seed(count))
        check(device_reader, numbers.to(dtype).to(device))


def test_numbers_beyond_the_range_of_floats(make: Make) -> None:
    device_reader, device = make()
    numbers = torch.randint(-(2**63), 2**63 - 1, (5000,), generator=torch.Generator().manual_seed(0))
    check(device_reader, numbers.to(device))
    check(device_reader, numbers.view(torch.uint64).to(device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_all_memory_layouts(make: Make, dtype: torch.dtype) -> None:
    device_reader, device = make()
    table = random((500, 37), device, dtype)
    heads = random((2, 16, 4, 32), device, dtype)
    for tensor in (
        table.t(),
        table[::2, 1:30:3],
        table.reshape(-1)[1:],
        heads.transpose(1, 2),
        heads[:, :, :1].expand(2, 16, 4, 32),
        heads.permute(3, 2, 1, 0),
        heads.as_strided((2, 2, 2, 2, 2, 2, 2), (7, 13, 1, 29, 3, 53, 101)),
    ):
        check(device_reader, tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_that_float32_sums_cannot_take(make: Make, dtype: torch.dtype) -> None:
    device_reader, device = make()
    broken = random((300, 1024), device, dtype)
    broken[3, 5] = math.nan
    broken[7] = math.inf
    broken[200:, ::2] = -math.inf
    numbers = torch.randn((300, 1024), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spiky = numbers.clone()
    spiky[:, 7] *= 300
    groups = numbers[0, :128].sign().repeat_interleave(8)
    small = 1e-7 if dtype == torch.float16 else 1e-24
    large = 1e4 if dtype == torch.float16 else 1e25
    for values in (
        small * numbers,
        large * numbers,
        numbers + 1000,
        spiky,
        numbers.relu(),
        numbers * 0,
        numbers * 0 + 3,
        (numbers > -1.4) / 0.92,
        small * groups,
    ):
        check(device_reader, values.to(dtype).to(device))
    check(device_reader, broken)
    check(device_reader, torch.full((5, 1024), math.nan, dtype=dtype, device=device))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_that_keep_all_processors_busy(
    kernels: Make, dtype: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_reader, device = kernels()
    elements = (1 << 26) + 5000 if large else 20_004_999
    if device == "cpu":
        monkeypatch.setattr(gpu, "_LARGE", 1 << 20)
        elements = (1 << 20) + 5000 if large else 604_999
    numbers = torch.randn(elements, device=device).to(dtype)
    numbers[elements // 3 :: 1001] = 0.0
    found, true = summary_of(device_reader, numbers), summarize(Torch().host(numbers))
    agree(found, true)
    numbers[-1] = math.nan
    numbers[elements // 2] = -math.inf
    agree(summary_of(device_reader, numbers), summarize(Torch().host(numbers)))
    strided = numbers[: 1 << 24 if device == "cuda" else 1 << 19].view(-1, 512, 8, 64).transpose(1, 2)
    agree(summary_of(device_reader, strided), summarize(Torch().host(strided.contiguous())))


def test_complex_numbers(make: Make) -> None:
    device_reader, device = make()
    numbers = torch.randn(50, 40, dtype=torch.complex64, generator=torch.Generator().manual_seed(2)).to(device)
    check(device_reader, numbers)
    check(device_reader, numbers.conj())
    check(device_reader, numbers.conj().imag)


def test_the_same_tensor_gives_the_same_bits(make: Make) -> None:
    device_reader, device = make()
    tensor = random((700, 1024), device, torch.bfloat16)
    once, again = summary_of(device_reader, tensor), summary_of(device_reader, tensor.clone())
    assert once.sketch.tobytes() == again.sketch.tobytes()
    assert (once.mean, once.std, once.l1, once.l2) == (again.mean, again.std, again.l1, again.l2)


def test_a_changed_tensor_is_read_again(make: Make) -> None:
    device_reader, device = make()
    tensor = random((64, 1024), device, torch.float32)
    first = device_reader.submit(tensor)
    second = device_reader.submit(tensor, first)
    tensor.data.mul_(2)
    third = device_reader.submit(tensor, first)
    device_reader.end_step()
    columns, unchanged, _ = device_reader.collect([first, second, third])
    assert list(unchanged) == [False, True, False]
    assert columns["l2"][0] == columns["l2"][1]
    assert columns["l2"][2] == pytest.approx(2 * columns["l2"][0])


def test_a_change_that_leaves_the_first_channel_alone(kernels: Make) -> None:
    device_reader, device = kernels()
    tensor = random((64, 256), device, torch.bfloat16)
    first = device_reader.submit(tensor)
    tensor.data[:, 1:] *= 2
    second = device_reader.submit(tensor, first)
    device_reader.end_step()
    assert list(device_reader.collect([first, second]).unchanged) == [False, False]


def test_more_tensors_than_there_is_room_for_at_a_time(kernels: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    device_reader, device = kernels()
    count, large = 2500, 200 << 20
    if device == "cpu":
        monkeypatch.setattr(torch_lane, "SLOTS", 80)
        count, large = 200, 1 << 18
    tensors = [torch.full((40,), float(number), device=device) for number in range(count)]
    tickets = [device_reader.submit(tensor) for tensor in tensors]
    tensors.append(torch.ones(large, device=device, dtype=torch.bfloat16))
    tickets.append(device_reader.submit(tensors[-1]))
    again = device_reader.submit(tensors[7], tickets[7])
    device_reader.end_step()
    columns, unchanged, _ = device_reader.collect([*tickets, again])
    assert columns["max"][:count].tolist() == list(range(count))
    assert columns["l1"][count] == large
    assert unchanged[-1] and columns["max"][-1] == 7


def test_a_layout_is_as_simple_as_the_strides_allow() -> None:
    assert lay_out((2, 3, 4), (12, 4, 1), 4, 256) == FLAT
    assert lay_out((2, 1, 4), (4, 99, 1), 4, 256) == FLAT
    assert lay_out((5,), (1,), 4, 260) == Layout(2, (5,), (1,))
    assert lay_out((2, 4, 8), (8, 16, 1), 2, 256) == Layout(1, (1, 4, 2), (8, 16, 8))
    assert lay_out((3, 2), (1, 3), 4, 256) == Layout(2, (2, 3), (3, 1))
    assert lay_out((2,) * 7, (7, 13, 1, 29, 3, 53, 101), 4, 256) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32])
def test_tensors_read_together_give_the_bits_that_each_gives_alone(kernels: Make, dtype: torch.dtype) -> None:
    device_reader, device = kernels()
    counts = [1 << 24, 1, 5, 1023, 8192, 20_004_999, (1 << 20) + 3, 2048, 100_000, 16384 * 300, 33, 8192 * 527]
    if device == "cpu":
        counts = [1 << 19, 1, 5, 1023, 8192, 604_999, (1 << 16) + 3, 2048, 20_000, 16384 * 10, 33, 8192 * 17]
    if dtype.itemsize == 8:  # or the largest would be read alone
        counts[0], counts[5] = counts[0] // 2, counts[5] // 2
    tensors = [random((count,), device, dtype) for count in counts]
    if dtype.is_floating_point:
        tensors[0][5] = math.nan
        tensors[5][77] = math.inf
        tensors[6][:8192] = 0
        tensors[9] += 1000
    alone = [device_reader.submit(tensor) for tensor in tensors]
    together = [defer(device_reader, tensor) for tensor in tensors]
    device_reader.end_step()
    one, other = (device_reader.collect(tickets).columns for tickets in (alone, together))
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def defer(device_reader: Any, tensor: torch.Tensor, known: Any = None, place: Any = None) -> Any:
    """Submit a tensor whose read may wait."""
    kind = device_reader.deferrable(tensor, None)
    assert kind is not None
    return device_reader.submit_deferred(tensor, kind, Forever(), known, place)


def test_a_tensor_that_waits_is_known_again_and_missed_if_it_changes(kernels: Make) -> None:
    device_reader, device = kernels()
    steady, changed = random((64, 1024), device, torch.float32), random((65, 1024), device, torch.float32)
    device_reader.submit(steady[:1])  # until a stream was seen, nothing waits for it
    tickets: list[Any] = []
    for tensor in (steady, steady, changed, changed):
        tickets.append(defer(device_reader, tensor, tickets[-1] if len(tickets) % 2 else None))
    changed.mul_(2)
    device_reader.end_step()
    columns, unchanged, missed = device_reader.collect(tickets)
    assert list(unchanged[:2]) == [False, True]
    assert set(missed) == {2, 3}
    agree(Summary(**{name: column[1] for name, column in columns.items()}), reference.summarize(Torch().host(steady)))

"""The arguments of a GPU kernel's launch, checked without a GPU."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, cast

import pytest

from tensortap.kernels.cuda import gpu
from tensortap.kernels.cuda.gpu import Gpu, PieceCounters, ReadPlan
from tensortap.kernels.cuda.layout import FLAT, Layout, lay_out
from tensortap.kernels.cuda.results import RESULT
from tensortap.kernels.cuda.variants import Device

H200 = Device(0, (9, 0), 132, "13.0")
HEAD = "<QII2Q"
"""The weights, how many tensors and pieces there are, where pieces are counted, and where the next launch will."""
WORK = "5Q4I"


class FakeKernel:
    def __init__(self) -> None:
        self.launched: list[tuple[int, int, bytes]] = []

    def prepared(self, blocks: int, parameter: Any, stream: int) -> Callable[[], None]:
        return lambda: self.launched.append((blocks, stream, bytes(parameter.memory)))


cleared: list[tuple[int, int, int]] = []
"""Address, how many numbers, and the stream."""


@pytest.fixture(autouse=True)
def _clear(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared.clear()
    monkeypatch.setattr(gpu, "clear", lambda *what: cleared.append(what))


def planned(elements: int, layout: Layout = FLAT) -> tuple[FakeKernel, ReadPlan]:
    kernel, device = with_fake_kernel()
    return kernel, device.plan("bfloat16", elements, layout, weights=77, turns=PieceCounters(0x9000, 5), stream=5)


def with_fake_kernel() -> tuple[FakeKernel, Gpu]:
    kernel, device = FakeKernel(), Gpu(H200)
    device._kernel = lambda variant: cast(Any, kernel)  # type: ignore[method-assign]
    return kernel, device


def test_addresses_change_and_the_rest_stays() -> None:
    layout = lay_out((2, 512, 8, 64), (512 * 512, 64, 512 * 64, 1), 2, 256)
    assert layout is not None and layout.code == 1
    kernel, plan = planned(2 * 512 * 8 * 64, layout)
    plan.read(0x1000, 0x2000, 0x3000)
    plan.read(0x4000, 0x5000, 0x6000, known=0x3000)
    probe = RESULT.fields["probe"][1] if RESULT.fields else 0
    found = [struct.unpack_from(f"{HEAD}{WORK}2I6I6q", memory) for _, _, memory in kernel.launched]
    assert [blocks for blocks, _, _ in kernel.launched] == [plan.pieces + 1] * 2, "one more for the probe"
    assert {stream for _, stream, _ in kernel.launched} == {5}
    assert found[0][:5] == (77, 1, plan.pieces, 0x9000, 0x9004)
    assert found[1][:5] == (77, 1, plan.pieces, 0x9004, 0x9000), "each launch counts where the one before has cleared"
    assert found[0][5:10] == (0x1000, 0x2000, 0x3000 + probe, 0, 524_288)
    assert found[1][5:10] == (0x4000, 0x5000, 0x6000 + probe, 0x3000 + probe, 524_288)
    sizes, strides = found[0][16:22], found[0][22:28]
    assert found[0][14] == len(layout.sizes)
    assert (sizes[: len(layout.sizes)], strides[: len(layout.sizes)]) == (layout.sizes, layout.strides)
    assert found[0][9:] == found[1][9:]
    assert cleared == [(0x9000, 2, 5)], "before the first launch, which nobody has cleared for"


SIZES = [0, 1, 1023, 1024, 8191, 8192, 100_000, 4_308_992, 16_777_216, 46_137_344, 1 << 33]


@pytest.mark.parametrize("elements", SIZES)
def test_all_batches_are_shared_out(elements: int) -> None:
    kernel, plan = planned(elements)
    plan.read(0, 0, 0)
    ((blocks, _, memory),) = kernel.launched
    *_, pieces, each, left, first = struct.unpack_from(HEAD + WORK, memory)
    assert pieces == plan.pieces and first == 0
    assert blocks == min(pieces + 1, 2 * H200.processors)
    assert 0 <= left < 2 * pieces
    assert 2 * pieces * each + left == elements // (8 * 1024)
    assert pieces == 1 or each >= 2, "no piece has nothing in it"
    assert pieces < 2 * H200.processors or pieces % (2 * H200.processors - 1) == 0, "each block has as many"


def test_after_a_launch_that_may_not_have_begun_nothing_is_counted_yet() -> None:
    """Counters that a failed launch did not clear would make the next launch skip pieces."""
    _, plan = planned(8192)
    plan.read(0, 0, 0)
    launch, plan._launch = plan._launch, interrupted
    with pytest.raises(KeyboardInterrupt):
        plan.read(0, 0, 0)
    plan._launch = launch
    del cleared[:]
    plan.read(0, 0, 0)
    plan.read(0, 0, 0)
    assert cleared == [(0x9000, 2, 5)], "once, and then all is well again"


def interrupted() -> None:
    raise KeyboardInterrupt


def test_tensors_that_are_read_together_are_divided_as_each_would_be_alone() -> None:
    kernel, device = with_fake_kernel()
    together = device.together("bfloat16", weights=77, turns=PieceCounters(0x9000, 5), stream=5)
    for _ in range(2):
        sizes = enumerate(SIZES)
        together.read([(0x1000 * (k + 1), size, together.shared_out(size), 100 + k, 200 + k, 0) for k, size in sizes])
    blocks, stream, memory = kernel.launched[0]
    assert (blocks, stream) == (2 * H200.processors, 5)
    weights, count, pieces, *counting = struct.unpack_from(HEAD, memory)
    assert (weights, count, counting) == (77, len(SIZES), [0x9000, 0x9004])
    assert struct.unpack_from(HEAD, kernel.launched[1][2])[3:] == (0x9004, 0x9000)
    first = 0
    for k, elements in enumerate(SIZES):
        place = struct.calcsize(HEAD) + struct.calcsize(f"<{WORK}") * k
        address, partials, _, expected, size, *share, own_first = struct.unpack_from(f"<{WORK}", memory, place)
        alone, plan = planned(elements)
        plan.read(0, 0, 0)
        assert (address, partials, expected, size) == (0x1000 * (k + 1), 100 + k, 0, elements)
        assert tuple(share) == struct.unpack_from(HEAD + WORK, alone.launched[0][2])[10:13]
        assert together.shared_out(elements) == tuple(share)
        assert own_first == first, "each begins where the one before it ends"
        first += share[0]
    assert pieces == first

"""What a GPU's kernel is launched with, which needs no GPU to be seen."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, cast

import pytest

from tensortap.kernels.gpu import FLAT, RESULT, Device, Gpu, Layout, Plan, lay_out

H200 = Device(0, (9, 0), 132, "13.0")


class FakeKernel:
    def __init__(self) -> None:
        self.launched: list[tuple[int, int, bytes]] = []

    def prepared(self, blocks: int, parameter: Any, stream: int) -> Callable[[], None]:
        return lambda: self.launched.append((blocks, stream, bytes(parameter.memory)))


def planned(elements: int, layout: Layout = FLAT) -> tuple[FakeKernel, Plan]:
    kernel, gpu = with_fake_kernel()
    return kernel, gpu.plan("bfloat16", elements, layout, weights=77, stream=5)


def with_fake_kernel() -> tuple[FakeKernel, Gpu]:
    kernel, gpu = FakeKernel(), Gpu(H200)
    gpu._kernel = lambda variant: cast(Any, kernel)  # type: ignore[method-assign]
    return kernel, gpu


def test_addresses_change_and_the_rest_stays() -> None:
    layout = lay_out((2, 512, 8, 64), (512 * 512, 64, 512 * 64, 1), 2, 256)
    assert layout is not None and layout.code == 1
    kernel, plan = planned(2 * 512 * 8 * 64, layout)
    plan.read(0x1000, 0x2000, 0x3000)
    plan.read(0x4000, 0x5000, 0x6000, known=0x3000)
    probe = RESULT.fields["probe"][1] if RESULT.fields else 0
    found = [struct.unpack_from("<Q2I5Q4I2I6I6q", memory) for _, _, memory in kernel.launched]
    assert [blocks for blocks, _, _ in kernel.launched] == [plan.blocks + 1] * 2, "one more for the probe"
    assert {stream for _, stream, _ in kernel.launched} == {5}
    assert found[0][:2] == (77, 1), "the weights, and one tensor"
    assert found[0][3:8] == (0x1000, 0x2000, 0x3000 + probe, 0, 524_288)
    assert found[1][3:8] == (0x4000, 0x5000, 0x6000 + probe, 0x3000 + probe, 524_288)
    sizes, strides = found[0][14:20], found[0][20:26]
    assert found[0][12] == len(layout.sizes)
    assert (sizes[: len(layout.sizes)], strides[: len(layout.sizes)]) == (layout.sizes, layout.strides)
    assert found[0][8:] == found[1][8:]


SIZES = [0, 1, 1023, 1024, 8191, 8192, 100_000, 4_308_992, 16_777_216, 1 << 33]


@pytest.mark.parametrize("elements", SIZES)
def test_all_batches_are_shared_out(elements: int) -> None:
    kernel, plan = planned(elements)
    plan.read(0, 0, 0)
    blocks, each, left = struct.unpack_from("<3I", kernel.launched[0][2], 56)
    assert blocks == plan.blocks <= 2 * H200.processors - 1
    assert 0 <= left < 2 * blocks
    assert 2 * blocks * each + left == elements // (8 * 1024)
    assert blocks == 1 or each >= 2, "no block has nothing to do"


def test_tensors_that_are_read_together_are_divided_as_each_would_be_alone() -> None:
    kernel, gpu = with_fake_kernel()
    together = gpu.together("bfloat16", weights=77, stream=5)
    together.read([(0x1000 * (k + 1), elements, 100 + k, 200 + k) for k, elements in enumerate(SIZES)])
    ((blocks, stream, memory),) = kernel.launched
    assert (blocks, stream) == (2 * H200.processors, 5)
    assert struct.unpack_from("<QI", memory) == (77, len(SIZES))
    first = 0
    for k, elements in enumerate(SIZES):
        address, partials, _, expected, count, *share, turn = struct.unpack_from("<5Q4I", memory, 16 + 56 * k)
        alone, plan = planned(elements)
        plan.read(0, 0, 0)
        assert (address, partials, expected, count) == (0x1000 * (k + 1), 100 + k, 0, elements)
        assert tuple(share) == struct.unpack_from("<3I", alone.launched[0][2], 56)
        assert together.blocks(elements) == share[0]
        assert turn == first % gpu.most_blocks, "each begins where the one before it ends"
        first += share[0]

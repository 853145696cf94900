"""The GPU's kernels on parts of a whole: digest and sketch at the positions in the whole, as the definition has them.

They run on a GPU where there is one, and everywhere on the CPU, from the same source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_kernels import FROM_SOURCE, ON_GPU, Make, agree, maker, random
from test_placed import PLACEMENTS

import tensortap as tt
from support.fake_gpu import Forever
from tensortap.core.placement import Placement
from tensortap.core.records import Summary
from tensortap.frameworks.device_reader import SlotPlacement
from tensortap.frameworks.torch.framework import Torch
from tensortap.kernels.cuda.parts import part_of
from tensortap.kernels.summary import reference

LARGER: dict[str, tuple[tuple[int, ...], Placement]] = {
    "rows from a fourth row on": ((40, 1024), Placement.of_block((96, 1024), (8, 0), (40, 1024))),
    "rows with a rest": ((37, 1000), Placement.of_block((1024 + 37, 1000), (1024, 0), (37, 1000))),
    "rows from any row on": ((33, 1024), Placement.of_block((64, 1024), (3, 0), (33, 1024))),
    "rows of any width": ((50, 333), Placement.of_block((500, 333), (77, 0), (50, 333))),
    "whole rows of columns": ((24, 1024), Placement.of_block((24, 4096), (0, 2048), (24, 1024))),
    "half rows of columns": ((40, 512), Placement.of_block((40, 4096), (0, 1536), (40, 512))),
    "wide columns": ((9, 3001), Placement.of_block((9, 9003), (0, 3001), (9, 3001))),
    "heads": ((2, 16, 3, 32), Placement.of_block((2, 16, 12, 32), (0, 0, 6, 0), (2, 16, 3, 32))),
    "blocks of three dimensions": ((5, 6, 7), Placement.of_block((15, 12, 21), (5, 6, 14), (5, 6, 7))),
    "interleaved": (
        (6 * 32, 48),
        Placement((18 * 32, 48), tuple(((32 * n, 32 * (3 * n + n % 2), 32), (0, 0, 48)) for n in range(6))),
    ),
}  # fmt: skip
ALL = PLACEMENTS | LARGER


@pytest.fixture(params=[ON_GPU, FROM_SOURCE])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return maker(request.param, monkeypatch)


def summary_of(device_reader: Any, tensor: torch.Tensor, placement: Placement) -> Summary:
    assert device_reader.can_place(tensor, placement)
    ticket = device_reader.submit(tensor, placement=placement)
    device_reader.end_step()
    columns, *_ = device_reader.collect([ticket])
    return Summary(**{name: column[0] if name == "sketch" else column[0].item() for name, column in columns.items()})


def check(device_reader: Any, tensor: torch.Tensor, placement: Placement) -> None:
    wanted = reference.summarize(Torch().host(tensor), placement)
    agree(summary_of(device_reader, tensor, placement), wanted)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.complex64]
)
def test_it_is_the_definition(kernels: Make, dtype: torch.dtype) -> None:
    device_reader, device = kernels()
    for shape, placement in ALL.values():
        check(device_reader, random(shape, device, dtype), placement)


def test_values_that_are_not_ordinary(kernels: Make) -> None:
    device_reader, device = kernels()
    for name in ("rows from a fourth row on", "half rows of columns", "any columns", "padding"):
        shape, placement = ALL[name]
        tensor = random(shape, device, torch.bfloat16)
        tensor[0, 0], tensor[1, 3], tensor[2, 1], tensor[3] = torch.nan, torch.inf, -torch.inf, 0.0
        tensor[4, 2] = torch.finfo(torch.bfloat16).max
        check(device_reader, tensor, placement)


def test_memory_in_any_layout(kernels: Make) -> None:
    device_reader, device = kernels()
    shape, placement = ALL["half rows of columns"]
    transposed = random((shape[1], shape[0]), device, torch.bfloat16).t()
    unaligned = random((shape[0] * shape[1] + 1,), device, torch.bfloat16)[1:].reshape(shape)
    strided = random((shape[0], 2 * shape[1]), device, torch.bfloat16)[:, ::2]
    for tensor in (transposed, unaligned, strided):
        check(device_reader, tensor, placement)


def test_parts_merge_to_the_whole(kernels: Make) -> None:
    device_reader, device = kernels()
    whole = random((48, 1536), device, torch.bfloat16)
    parts = []
    for row, rows in ((0, 16), (16, 32)):
        for column, columns in ((0, 512), (512, 1024)):
            placement = Placement.of_block((48, 1536), (row, column), (rows, columns))
            parts.append(
                summary_of(device_reader, whole[row : row + rows, column : column + columns].contiguous(), placement)
            )
    agree(reference.merge(parts), reference.summarize(Torch().host(whole)))


def test_a_tensor_seen_again_is_probed(kernels: Make) -> None:
    """Also one with several boxes, whose launches all probe the same elements."""
    device_reader, device = kernels()
    for name in ("interleaved", "half rows of columns", "rows from a fourth row on"):
        shape, placement = LARGER[name]
        tensor = random(shape, device, torch.float32)
        first = device_reader.submit(tensor, placement=placement)
        again = device_reader.submit(tensor, first, placement=placement)
        tensor += 1
        changed = device_reader.submit(tensor, again, placement=placement)
        device_reader.end_step()
        columns, unchanged, _ = device_reader.collect([first, again, changed])
        assert list(unchanged) == [False, True, False]
        assert columns["digest"][0] == columns["digest"][1] != columns["digest"][2]
        assert int(columns["digest"][2]) == reference.summarize(Torch().host(tensor), placement).digest


def test_which_parts_are_read_like_whole_tensors() -> None:
    def base(name: str) -> int:
        part = part_of(ALL[name][1], ALL[name][0], 1)
        assert part is not None
        return part.base

    assert base("rows from a fourth row on") == 8 and base("rows with a rest") == 1000
    assert base("the whole") == 0
    assert base("rows from any row on") == base("half rows of columns") == base("padded columns") == -1


def test_too_many_boxes_are_left_to_the_host() -> None:
    boxes = tuple(((2 * n, 4 * n, 2), (0, 0, 3)) for n in range(100))
    assert part_of(Placement((400, 3), boxes), (200, 3), 1) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_read_together_give_the_bits_that_each_gives_alone(kernels: Make, dtype: torch.dtype) -> None:
    """Among them is a whole tensor. The rest begins at another row of its own whole."""
    device_reader, device = kernels()
    shapes = [(64, 1024), (4, 1024), (37, 1000), (1, 5), (20, 8192), (6, 512)]
    starts = [64, 4, 1024, 0, 4000, 16]
    tensors = [random(shape, device, dtype) for shape in shapes]
    placements = [
        Placement.of_block((2 * start + rows, columns), (start, 0), (rows, columns))
        for (rows, columns), start in zip(shapes, starts, strict=True)
    ]
    alone = [device_reader.submit(each, placement=place) for each, place in zip(tensors, placements, strict=True)]
    together: list[Any] = []
    for tensor, placement in zip(tensors, placements, strict=True):
        base = device_reader.base_of(tensor, placement)
        place = SlotPlacement(placement, 0, base, tuple(tensor.shape), None)
        assert base is not None
        kind = device_reader.deferrable(tensor, None)
        assert kind is not None
        together.append(device_reader.submit_deferred(tensor, kind, Forever(), None, place))
    device_reader.end_step()
    one, other = (device_reader.collect(tickets).columns for tickets in (alone, together))
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    whole = reference.summarize(Torch().host(tensors[0]), placements[0])
    assert int(other["digest"][0]) == whole.digest


def test_parts_that_cannot_be_read_together(kernels: Make) -> None:
    device_reader, device = kernels()
    tensor = random((8, 1024), device, torch.float32)
    for placement in (
        Placement.of_block((64, 1024), (3, 0), (8, 1024)),
        Placement.of_block((8, 4096), (0, 1024), (8, 1024)),
        Placement((64, 1024), (((0, 8, 4), (0, 0, 1024)),)),
        Placement((1024, 64), (((0, 0, 1024), (0, 4, 8)),), order=(1, 0)),
    ):
        assert device_reader.base_of(tensor, placement) is None


def test_records_of_a_layout_are_those_of_the_host(
    kernels: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A capture with a layout, once on the device and once on the host."""
    device_reader, device = kernels()
    layout = {"mesh": {"micro": 2}, "layout": {"*:output": "b[micro] h"}}

    def record(path: Path) -> dict[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Tanh()).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with tt.capture(model, path, layout=layout, optimizer=optimizer, kinds=("input", "output", "param")):
            for _ in range(2):
                for _ in range(2):
                    model(torch.ones(4, 8, device=device)).sum().backward()
                optimizer.step()
        return {record.key: record for record in tt.open(path)}

    monkeypatch.setattr(Torch, "device_reader", lambda self, tensor: device_reader)
    there = record(tmp_path / "device")
    monkeypatch.setattr(Torch, "device_reader", lambda self, tensor: None)
    here = record(tmp_path / "host")
    assert here.keys() == there.keys() and any(each.placement is not None for each in here.values())
    for key, each in there.items():
        assert each.placement == here[key].placement and each.tensor is not None
        assert each.summary.digest == here[key].summary.digest, key
        np.testing.assert_allclose(each.summary.sketch, here[key].summary.sketch, rtol=1e-5, atol=1e-5)
    assert len({each.tensor for each in there.values()}) == len({each.tensor for each in here.values()})

"""The CPU kernel with a placement: the same as the definition, for every kind of part."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tensortap.core import dtypes
from tensortap.core.layouts import parse_layout
from tensortap.core.placement import Mesh, Placement
from tensortap.core.records import Summary
from tensortap.kernels.summary import cpu, parts, reference

PLACEMENTS: dict[str, tuple[tuple[int, ...], Placement]] = {
    "rows": ((6, 1024), Placement.of_block((48, 1024), (12, 0), (6, 1024))),
    "aligned columns": ((40, 64), Placement.of_block((40, 256), (0, 128), (40, 64))),
    "any columns": ((40, 33), Placement.of_block((40, 101), (0, 17), (40, 33))),
    "a flat range": ((777,), Placement((33, 67), (((0, 101, 777),),))),
    "a cut flat range": ((50,), Placement((33, 67), (((3, 101, 40),),))),
    "zigzag": (
        (3, 10, 24),
        Placement((3, 20, 24), tuple(((0, 0, 3), (local, at, 5), (0, 0, 24)) for local, at in ((0, 0), (5, 15)))),
    ),
    "padding": ((10, 24), Placement((17, 24), (((0, 10, 7), (0, 0, 24)),))),
    "padded columns": ((10, 24), Placement((10, 40), (((0, 0, 10), (0, 20, 20)),))),
    "padding behind two boxes": ((6, 16), Placement((5, 32), (((0, 0, 5), (0, 0, 8)), ((0, 0, 5), (8, 24, 8))))),
    "another order": ((6, 5, 8), Placement((10, 6, 8), (((0, 5, 5), (0, 0, 6), (0, 0, 8)),), order=(1, 0, 2))),
    "the whole": ((7, 9), Placement.of_whole((7, 9), {}, "")),
    "nothing": ((0, 9), Placement((7, 9), (((0, 7, 0), (0, 0, 9)),))),
    "a number": ((), Placement.of_whole((), {}, "")),
}  # fmt: skip


def random(name: str, shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(1)
    dtype = dtypes.numpy_dtype(name)
    values = rng.normal(1, 20, shape)
    values = np.where(rng.random(shape) < 0.01, np.inf, values) if dtype.kind == "f" else values
    if dtype.kind == "c":
        values = values + 1j * rng.normal(0, 1, shape)
    return np.asarray(values).astype(dtype)


def assert_same(found: Summary, wanted: Summary) -> None:
    assert found.digest == wanted.digest
    for name in ("elements", "nan", "posinf", "neginf", "zeros", "edge"):
        assert getattr(found, name) == getattr(wanted, name), name
    for name in ("min", "max", "mean", "std", "l1", "l2"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-9, nan_ok=True), name
    size = np.abs(wanted.sketch).max()
    np.testing.assert_allclose(found.sketch, wanted.sketch, rtol=2e-6, atol=2e-6 * (1 + size))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float64", "complex64"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_it_is_the_definition(name: str, dtype: str) -> None:
    shape, placement = PLACEMENTS[name]
    array = random(dtype, shape)
    wanted = reference.summarize(array, placement)
    for _ in range(3):  # short runs have a plan from the second time on
        assert_same(cpu.summarize(array, placement=placement), wanted)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("(g=8: q*2 k v)[tp] h -> q|k|v", (64, 24)),
        ("(gate|up)[tp] h", (48, 40)),
        ("v[tp]%90 h", (48, 17)),
        ("s[tp:zigzag] h", (20, 24)),
        ("s[tp:strided] h", (20, 24)),
        ("(b=3 s[tp]) h", (30, 24)),
        ("s b h[tp] -> b s h", (6, 5, 8)),
    ],
)
def test_parts_of_a_layout_merge(text: str, shape: tuple[int, ...]) -> None:
    """Both ranks together have the summary of the whole, whose elements are their positions."""
    found, wholes = [], []
    for rank in (0, 1):
        mesh = Mesh(("tp",), (2,), (rank,))
        placement = parse_layout(text, mesh.names).place(shape, mesh)
        whole = np.arange(np.prod(placement.shape), dtype=np.float32).reshape(placement.shape)
        moved = np.full([shape[at] for at in placement.order] if placement.order else shape, 7e6, np.float32)
        for box in placement.boxes:
            local = tuple(slice(start, start + length) for start, _, length in box)
            moved[local] = whole[tuple(slice(at, at + length) for _, at, length in box)]
        array = moved.transpose(np.argsort(placement.order)) if placement.order else moved
        found.append(cpu.summarize(np.ascontiguousarray(array), placement=placement))
        wholes.append(whole)
    assert_same(reference.merge(found), reference.summarize(wholes[0]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int32", "float64", "complex128"])
def test_any_block_of_any_whole(dtype: str) -> None:
    """Blocks of random widths and offsets, so that runs begin and end anywhere in groups, lines and rows."""
    rng = np.random.default_rng(7)
    for _ in range(12):
        whole = tuple(int(size) for size in rng.choice([1, 3, 8, 24, 65, 128, 700, 1024, 1500], 2))
        block = tuple(int(rng.integers(1, size + 1)) for size in whole)
        offset = tuple(int(rng.integers(0, size - length + 1)) for size, length in zip(whole, block, strict=True))
        placement = Placement.of_block(whole, offset, block)
        array = random(dtype, block)
        wanted = reference.summarize(array, placement)
        for _ in range(2):
            assert_same(cpu.summarize(array, placement=placement), wanted)


def test_positions_past_32_bits() -> None:
    whole = 1 << 24, 1 << 20
    placement = Placement.of_block(whole, ((1 << 24) - 70, 12345), (70, 100))
    array = random("float32", (70, 100))
    wanted = reference.summarize(array, placement)
    for _ in range(2):
        assert_same(cpu.summarize(array, placement=placement), wanted)


def test_plans_make_room_for_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other summary of a placement that was dropped is made without a plan, and is the same bit for bit."""
    monkeypatch.setattr(parts, "_MOST_BYTES", 20_000)
    monkeypatch.setattr(parts, "_kept", deque())
    array = random("float32", (60, 40))
    placements = [Placement.of_block((60, 200), (0, 3 + at), (60, 40)) for at in range(9)]
    first = [cpu.summarize(array, placement=placement) for placement in placements]
    for _ in range(4):
        for placement, wanted in zip(placements, first, strict=True):
            again = cpu.summarize(array, placement=placement)
            assert again.digest == wanted.digest
            np.testing.assert_array_equal(again.sketch, wanted.sketch)
        assert 0 < len(parts._kept) < len(placements)


def test_many_chunks_and_threads() -> None:
    array = random("float32", (1100, 520))
    edges = [0, 1, 300, 301, 1100]
    found = [
        cpu.summarize(array[a:b, s], threads, Placement.of_block((1100, 520), (a, s.start), (b - a, s.stop - s.start)))
        for a, b in pairwise(edges)
        for s, threads in ((slice(0, 123), 1), (slice(123, 520), 4))
    ]
    assert_same(reference.merge(found), cpu.summarize(array))

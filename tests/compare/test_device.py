"""Pairs measured by torch operations against the compiled kernel: on torch's CPU, and on a GPU where there is one."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_runs import Seen, chain, values, write
from test_engine import Array
from test_engine import arrays as of_many_kinds
from test_engine import write as write_file

import tensortap as tt
from tensortap.compare.measure.device import OnDevice
from tensortap.compare.measure.engine import Serial, Task
from tensortap.core import dtypes
from tensortap.errors import MissingDependency, RunUnreadable, UsageError
from tensortap.frameworks.torch.pairs import TorchPairs
from tensortap.kernels import summarize
from tensortap.kernels.pairs.cpu import PairMeasure

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
EXACT = ("elements", "equal", "exact", "rel_l2_bar", "max_abs", "max_abs_index", "reference_value", "candidate_value")
EXACT += ("max_ulp", "mismatched", "row_index")
REAL = [name for name in dtypes.NAMES if not name.startswith("complex")]
ROWS: list[tuple[int, ...]] = [
    (5, 7),
    (700, 3),
    (9000, 2),
    (50, 768),
    (2, 300_000),
    (300, 2048),
    (131, 4001),
    (1000, 1),
]


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> TorchPairs:
    return TorchPairs(torch.device(request.param))


def near(found: float, expected: float, size: float = 0.0) -> bool:
    return bool(found == pytest.approx(expected, rel=1e-12, abs=1e-13 * size, nan_ok=True))


def assert_same(found: PairMeasure, expected: PairMeasure) -> None:
    for name in EXACT:
        ours, theirs = getattr(found.difference, name), getattr(expected.difference, name)
        assert ours == theirs or (ours != ours and theirs != theirs), (name, ours, theirs)
    for name in ("rel_l2", "l2", "row_rel_l2"):
        assert near(getattr(found.difference, name), getattr(expected.difference, name)), name
    assert near(found.difference.cosine, expected.difference.cosine, 1)
    for ours, theirs in ((found.reference, expected.reference), (found.candidate, expected.candidate)):
        assert (ours.elements, ours.nan, ours.posinf, ours.neginf) == (
            theirs.elements,
            theirs.nan,
            theirs.posinf,
            theirs.neginf,
        )
        size = theirs.l2 / math.sqrt(max(theirs.elements, 1))
        assert near(ours.mean, theirs.mean, size)
        assert near(ours.std, theirs.std, size)
        assert near(ours.l2, theirs.l2)


def check(
    device: TorchPairs, path: Path, reference: list[Array], candidate: list[Array], piece: int = 1 << 20, **options: Any
) -> list[PairMeasure]:
    """Both ways, in pieces of one chunk or a few, everything on the device; return the device's result."""
    spans = zip(write_file(path / "r", reference), write_file(path / "c", candidate, 8), strict=True)
    sizes = [summarize(each).l2 for each in reference]
    tasks = [Task(r, c, size=size, **options) for (r, c), size in zip(spans, sizes, strict=True)]
    found = dict(OnDevice(device, piece, least=0).run(tasks))
    for number, expected in Serial().run(tasks):
        assert_same(found[number], expected)
    return [found[number] for number in range(len(tasks))]


def random_bits(name: str, n: int, seed: int) -> Array:
    """Every pattern that the type has: NaN, inf and denormals among them."""
    dtype = dtypes.numpy_dtype(name)
    raw = np.random.default_rng(seed).integers(0, 256, n * dtype.itemsize, dtype=np.uint8)
    if name == "bool":
        raw &= 1
    if name in ("float64", "complex128"):
        raw[7::8] &= 0xBF
    return raw.view(dtype)


def alike(name: str, shape: tuple[int, ...], seed: int = 1) -> tuple[Array, Array]:
    """Numbers, and the same a little off."""
    rng = np.random.default_rng(seed)
    r = rng.normal(0, 20, shape) + (1j * rng.normal(0, 1, shape) if name.startswith("complex") else 0)
    c = r * (1 + 0.01 * rng.normal(0, 1, shape))
    if dtypes.numpy_dtype(name).kind in "ub" or name == "int8":
        r, c = np.abs(r), np.abs(c)
    return r.astype(dtypes.numpy_dtype(name)), c.astype(dtypes.numpy_dtype(name))


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_every_dtype(device: TorchPairs, tmp_path: Path, name: str) -> None:
    """Odd lengths, all bit patterns, and numbers that are near to one another; a tensor of several pieces."""
    lengths = (1, 7, 1023, 5000, 700_001)
    wild = [(random_bits(name, n, 1), random_bits(name, n, 2)) for n in lengths[:-1]]
    tame = [alike(name, (n,)) for n in lengths]
    reference, candidate = zip(*wild, *tame, strict=True)
    check(device, tmp_path, list(reference), list(candidate))


@pytest.mark.parametrize("name", REAL)
def test_two_dtypes(device: TorchPairs, tmp_path: Path, name: str) -> None:
    others = [other for other in REAL if other != name]
    reference = [random_bits(name, 1100, 1) for _ in others] + [alike(name, (1100,))[0] for _ in others]
    candidate = [random_bits(other, 1100, 2) for other in others] + [alike(other, (1100,))[1] for other in others]
    check(device, tmp_path, reference, candidate)


def test_tensors_of_many_kinds(device: TorchPairs, tmp_path: Path) -> None:
    check(device, tmp_path, *of_many_kinds())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64", "int64"])
def test_rows_cut_by_pieces(device: TorchPairs, tmp_path: Path, name: str) -> None:
    pairs = [alike(name, shape) for shape in ROWS]
    for reference, candidate in pairs[1::2]:
        candidate[1:] = reference[1:]
        if reference.dtype.kind not in "iu":
            candidate.reshape(-1)[5], reference.reshape(-1)[-1] = np.nan, np.inf
    reference, candidate = zip(*pairs, strict=True)
    check(device, tmp_path, list(reference), list(candidate))
    check(device, tmp_path, list(reference), list(candidate), piece=32 << 20)


def test_integers_that_float64_does_not_hold(device: TorchPairs, tmp_path: Path) -> None:
    edges = [0, 1, -1, 2**53, 2**53 + 1, 2**62 + 3, 2**63 - 1, -(2**63), -(2**63) + 1]
    whole = [0, 1, 2**53 + 1, 2**63, 2**64 - 1, 2**64 - 2]
    signed = [np.array([pair], np.int64) for pair in itertools.product(edges, repeat=2)]
    unsigned = [np.array([pair], np.uint64) for pair in itertools.product(whole, repeat=2)]
    reference = [each[:, 0].copy() for each in (*signed, *unsigned)]
    candidate = [each[:, 1].copy() for each in (*signed, *unsigned)]
    for a, b in itertools.product(edges, whole):
        reference += [np.array([a], np.int64), np.array([b], np.uint64)]
        candidate += [np.array([b], np.uint64), np.array([a], np.int64)]
    check(device, tmp_path, reference, candidate)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_units_in_the_last_place(device: TorchPairs, tmp_path: Path, name: str) -> None:
    dtype = dtypes.numpy_dtype(name)
    bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        numbers = bits.view(dtype).astype(np.float64)
    ordered = np.unique(numbers[np.isfinite(numbers)] + 0.0).astype(dtype)
    found = check(device, tmp_path, [ordered[:-5]] * 2, [ordered[5:], ordered[5:].astype(np.float64)])
    assert [each.difference.max_ulp for each in found] == [5, 5]


def test_constants_have_no_spread_and_equal_tensors_are_equal(device: TorchPairs, tmp_path: Path) -> None:
    constant = np.full(700_001, 0.1)
    zeros = np.zeros((30, 40), np.float32)
    found = check(
        device,
        tmp_path,
        [constant, zeros, zeros, np.full(5, np.nan)],
        [constant + 0.1, zeros, -zeros, np.full(5, np.nan)],
    )
    assert (found[0].reference.mean, found[0].reference.std, found[0].candidate.std) == (0.1, 0, 0)
    assert [each.difference.equal for each in found] == [False, True, False, True]


def test_tolerances_and_ranges_are_taken(device: TorchPairs, tmp_path: Path) -> None:
    pair = alike("float32", (60, 5000))
    check(device, tmp_path, [pair[0]], [pair[1]], rtol=0.01, atol=0.02)
    (found,) = check(device, tmp_path, [pair[0]], [pair[1]], start=10, stop=1999, rtol=0.0, atol=0.0)
    assert found.difference.elements == 1989
    with pytest.raises(UsageError, match="rtol and atol must be 0 or more"):
        check(device, tmp_path, [pair[0]], [pair[1]], rtol=-1.0)


def test_small_tensors_stay_on_the_cpu(device: TorchPairs, tmp_path: Path) -> None:
    """To the last bit: the very same kernel measures them."""
    reference, candidate = of_many_kinds()
    tasks = [
        Task(r, c)
        for r, c in zip(write_file(tmp_path / "r", reference), write_file(tmp_path / "c", candidate), strict=True)
    ]
    reported: list[int] = []
    found, expected = dict(OnDevice(device).run(tasks, reported.append)), dict(Serial().run(tasks))
    assert {repr(found[n]) == repr(expected[n]) for n in range(len(tasks)) if tasks[n].nbytes < 1 << 20} == {True}
    assert reported[-1] == sum(task.nbytes for task in tasks)
    assert reported == sorted(reported)


def test_a_file_that_is_cut_off_or_gone_is_named(device: TorchPairs, tmp_path: Path) -> None:
    reference, candidate = alike("float32", (400_000,))
    tasks = [Task(write_file(tmp_path / "r", [reference])[0], write_file(tmp_path / "c", [candidate])[0])]
    path = tmp_path / "c"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(RunUnreadable, match=r"c is cut off: bytes \d+ to \d+ are not there"):
        list(OnDevice(device).run(tasks))
    path.unlink()
    with pytest.raises(RunUnreadable, match="c is missing"):
        list(OnDevice(device).run(tasks))


def test_an_early_stop_leaves_the_rest(device: TorchPairs, tmp_path: Path) -> None:
    reference, candidate = alike("float32", (400_000,))
    spans = write_file(tmp_path / "r", [reference])[0], write_file(tmp_path / "c", [candidate])[0]
    asked = 0

    def endless() -> Any:
        nonlocal asked
        while True:
            asked += 1
            yield Task(*spans)

    results = OnDevice(device).run(endless())
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert asked < 20


# --- through tensortap.compare -------------------------------------------------------------------------------------
def test_a_missing_device_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "a", chain())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="torch finds no GPU here; leave the device out"):
        tt.compare(run, run, device="cuda")
    for name in ("mps", "nonsense"):
        with pytest.raises(UsageError, match=f"device='{name}' is unknown"):
            tt.compare(run, run, device=name)
    with pytest.raises(UsageError, match="workers measure on the CPU"):
        tt.compare(run, run, device="cuda", workers=2)
    monkeypatch.delitem(sys.modules, "tensortap.frameworks.torch.pairs")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match="needs torch, which is not installed"):
        tt.compare(run, run, device="cuda")


def test_runs_compared_on_a_device(device: TorchPairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All columns, the verdict and the sentence are those of the CPU."""
    import tensortap.frameworks as frameworks

    monkeypatch.setattr(frameworks, "pair_device", lambda name: device)
    large = {n: values(n, (300, 2000)) for n in range(3)}
    ours = [Seen(f"m{n}", large[n]) for n in large]
    theirs = [Seen(f"m{n}", large[n] * np.float32(1 + n * 1e-3)) for n in large]
    runs = write(tmp_path / "a", [*ours, *chain()]), write(tmp_path / "b", [*theirs, *chain(off={"fc2": 0.1})])
    here, there = tt.compare(*runs), tt.compare(*runs, device="cuda")
    assert (str(here), here.counts) == (str(there), there.counts)
    for one, other in zip(here.rows, there.rows, strict=True):
        for name, value in one.items():
            assert other[name] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), name
    assert tt.compare(*runs, device="cuda", until_first=True).first.key == here.first.key
    assert tt.compare(*runs, device="cuda", noise=[runs[1]]).verdict == "match"

"""The sketch estimates |A - B| within 15 % in 95 % of seeded cases, without bias in any family of faults."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tensortap.kernels.summary import reference

Array = npt.NDArray[np.float32]
Fault = Callable[[Array, np.random.Generator], Array]

# Multiples of nothing, and the powers of two at which a column always falls on the same position of a sketch row.
SHAPES = [
    (37, 53),
    (129, 517),
    (211, 384),
    (1000, 77),
    (512, 64),
    (256, 128),
    (150, 1024),
    (64, 4096),
    (3, 91, 255),
]
SEEDS = 3


def noise(x: Array, rng: np.random.Generator) -> Array:
    return x + rng.normal(0, 1e-3, x.shape).astype(np.float32)


def outlier_rounded(x: Array, rng: np.random.Generator) -> Array:
    """One channel 300 times the others; everything is rounded to bfloat16."""
    x[..., rng.integers(x.shape[-1])] *= 300
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def outlier_wrong(x: Array, rng: np.random.Generator) -> Array:
    column = rng.integers(x.shape[-1])
    x[..., column] *= 300
    wrong = x.copy()
    wrong[..., column] *= 1.01
    return wrong


def offset(x: Array, rng: np.random.Generator) -> Array:
    return x + np.float32(0.01)


def one_row(x: Array, rng: np.random.Generator) -> Array:
    wrong = x.copy()
    row = wrong.reshape(-1, x.shape[-1])[rng.integers(x.shape[0])]
    row += rng.normal(0, 1, row.shape).astype(np.float32)
    return wrong


def one_element(x: Array, rng: np.random.Generator) -> Array:
    wrong = x.copy()
    wrong.reshape(-1)[rng.integers(x.size)] += 1
    return wrong


def column_sign(x: Array, rng: np.random.Generator) -> Array:
    wrong = x.copy()
    wrong[..., rng.integers(x.shape[-1])] *= -1
    return wrong


def column_offset(x: Array, rng: np.random.Generator) -> Array:
    wrong = x.copy()
    wrong[..., rng.integers(x.shape[-1])] += 1
    return wrong


def scaled(x: Array, rng: np.random.Generator) -> Array:
    return x * np.float32(1.001)


def reversed_rows(x: Array, rng: np.random.Generator) -> Array:
    return x[::-1].copy()


def shifted(x: Array, rng: np.random.Generator) -> Array:
    return np.roll(x, 1, axis=-1)


def eighth_columns(x: Array, rng: np.random.Generator) -> Array:
    """Every eighth element is wrong, as with a wrong head or a wrong vector lane."""
    wrong = x.copy()
    wrong[..., rng.integers(8) :: 8] += 0.1
    return wrong


FAULTS: list[Fault] = [
    noise,
    outlier_rounded,
    outlier_wrong,
    offset,
    one_row,
    one_element,
    column_sign,
    column_offset,
    scaled,
    reversed_rows,
    shifted,
    eighth_columns,
]


def ratio(right: Array, wrong: Array) -> float:
    truth = np.linalg.norm((right.astype(np.float64) - wrong).ravel())
    return reference.sketch_distance(reference.summarize(right), reference.summarize(wrong)) / float(truth)


def ratios(fault: Fault) -> list[float]:
    found = []
    for i, shape in enumerate(SHAPES):
        for seed in range(SEEDS):
            rng = np.random.default_rng([i, seed])
            right = rng.normal(0, 1, shape).astype(np.float32)
            wrong = fault(right, rng)  # may make an outlier of the right one too
            found.append(ratio(right, wrong))
    return found


@pytest.fixture(scope="module")
def measured() -> dict[str, list[float]]:
    return {fault.__name__: ratios(fault) for fault in FAULTS}


def test_estimate_is_within_15_percent(measured: dict[str, list[float]]) -> None:
    every = np.array([r for family in measured.values() for r in family])
    assert every.size >= 200
    close = np.abs(every - 1) < 0.15
    assert close.mean() >= 0.95, {name: np.round(family, 2) for name, family in measured.items()}


@pytest.mark.parametrize("family", [fault.__name__ for fault in FAULTS])
def test_no_family_is_biased(measured: dict[str, list[float]], family: str) -> None:
    squares = np.square(measured[family])
    # 128 buckets at least: the standard error of one square is 12.5 %, that of n squares' mean 12.5 % / sqrt(n).
    assert abs(squares.mean() - 1) < 4 * 0.125 / math.sqrt(squares.size)
    assert np.mean(np.abs(np.array(measured[family]) - 1) < 0.15) >= 0.9


def test_bf16_rounding_of_a_real_layer() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    found = []
    for width in (96, 256, 1024):
        layer = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())
        with torch.no_grad():
            out = layer(torch.randn(4, 67, width))
        found.append(ratio(out.numpy(), out.bfloat16().float().numpy()))
    assert np.abs(np.array(found) - 1).max() < 0.15


def test_one_wrong_element_is_measured_exactly() -> None:
    right = np.zeros((33, 100), np.float32)
    wrong = right.copy()
    wrong[20, 7] = 0.5
    assert ratio(right, wrong) == 1


def test_signs_and_buckets_are_even() -> None:
    """Each bucket takes 1/256 of the elements, and plus as often as minus."""
    n = 1 << 20
    sums = reference.summarize(np.ones(n, np.float32)).sketch
    per_bucket = n / reference.BUCKETS
    assert np.abs(sums).max() < 5 * math.sqrt(per_bucket)
    assert abs(np.square(sums).mean() / per_bucket - 1) < 0.4

"""Activation functions by their values: whether one tensor is the activation of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import erf, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ActivationSums", "activation_between", "is_relu_between"]

Array = npt.NDArray[np.float64]
_SAMPLE = 4096
_NEAR = 1e-3


class ActivationSums(NamedTuple):
    """The numbers of a summary by which activations are recognised."""

    elements: float
    zeros: float
    low: float
    high: float
    mean: float
    l1: float


def is_relu_between(before: ActivationSums, after: ActivationSums) -> bool:
    """Whether one tensor may be the ReLU of another, by their summaries: it has the same largest element, nothing below
    zero, and sums up to the positive elements of the other."""
    if before.elements != after.elements or not before.low < 0 == after.low or not after.zeros or not after.high > 0:
        return False
    positive = (before.l1 + before.mean * before.elements) / 2
    return abs(after.high - before.high) <= _NEAR * before.high and abs(after.l1 - positive) <= _NEAR * positive


def activation_between(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> str | None:
    """Return the name of the function that maps one tensor to another, by their first elements; None if none does.

    >>> activation_between(np.array([-1.0, 2.0, 3.0]), np.array([0.0, 2.0, 3.0]))
    'relu'
    """
    if before.shape != after.shape or before.dtype.kind == "c" or after.dtype.kind == "c":
        return None
    given, found = (array.reshape(-1)[:_SAMPLE].astype(np.float64) for array in (before, after))
    if not (np.isfinite(given).all() and np.isfinite(found).all()) or not np.any(found):
        return None
    with np.errstate(over="ignore"):
        apart = {name: np.linalg.norm(function(given) - found) for name, function in _FUNCTIONS.items()}
    name = min(apart, key=lambda each: float(apart[each]))
    return name if apart[name] <= _NEAR * np.linalg.norm(found) else None


def _sigmoid(x: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-x))
    return found


def _gelu(x: Array) -> Array:
    share: Array = np.array([0.5 * (1 + erf(value / sqrt(2))) for value in x.tolist()])
    return x * share


_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "hardsigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "hardswish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
}

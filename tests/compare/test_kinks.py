"""Gradients of which few elements crossed a kink are right; those that are wrong otherwise are found beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from made_runs import Seen, values, write

import tensortap as tt
from tensortap.compare.measure.kinks import crossed_kink
from tensortap.core.records import Comparison

Array = npt.NDArray[Any]
KEEP = pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])
NEAR = np.float32(1 + 2**-22)


def relu(gradient: Array, keep: bool, weight: Array | None = None) -> list[Seen]:
    """An activation whose backward sends `gradient` to its input."""
    x, came = values(1, (64, 64)), values(2, (64, 64))
    weight = values(4, (64, 64)) if weight is None else weight
    return [
        Seen("act", x, "input", keep=keep, tensor=100),
        Seen("act", np.maximum(x, 0), keep=keep, tensor=101),
        Seen("act", came, "grad_output", keep=keep, tensor=102),
        Seen("act", gradient, "grad_input", keep=keep, tensor=103),
        Seen("act", weight, "param_grad", path="weight", keep=keep, tensor=104),
    ]


def sent() -> Array:
    return np.where(values(1, (64, 64)) > 0, values(2, (64, 64)), 0).astype(np.float32)


def compared(tmp_path: Path, gradient: Array, keep: bool, weight: Array | None = None) -> Comparison:
    a = write(tmp_path / "a", relu(sent(), keep))
    return tt.compare(a, write(tmp_path / "b", relu(gradient, keep, weight)))


@KEEP
@pytest.mark.parametrize("crossed", [1, 3])
def test_few_elements_that_crossed_a_kink(tmp_path: Path, crossed: int, keep: bool) -> None:
    gradient = sent() * NEAR
    open_ = np.argwhere(np.abs(sent()) > 0.5)[::97][:crossed]
    for row, column in open_:
        gradient[row, column] = 0.0
    result = compared(tmp_path, gradient, keep)
    assert result.verdict == "match", result.sentence
    note = next(note for note in result.notes if "crossed a kink" in note)
    assert f"{crossed} of 4,096 elements of act · grad_input 0" in note and "the rest agrees to 2." in note


@KEEP
def test_a_row_that_is_cut_off_is_no_kink(tmp_path: Path, keep: bool) -> None:
    gradient = sent()
    gradient[5] = 0.0
    result = compared(tmp_path, gradient, keep)
    assert result.first is not None and result.first.key.kind == "grad_input"


@KEEP
def test_a_mistake_beside_a_kink_is_found(tmp_path: Path, keep: bool) -> None:
    gradient = sent() * np.float32(1.001)
    gradient[tuple(np.argwhere(np.abs(sent()) > 0.5)[0])] = 0.0
    result = compared(tmp_path, gradient, keep)
    assert result.first is not None and result.first.key.kind == "grad_input"


@KEEP
def test_a_parameter_has_no_kinks(tmp_path: Path, keep: bool) -> None:
    weight = values(4, (64, 64))
    weight[3, 4] = 0.0
    result = compared(tmp_path, sent(), keep, weight)
    assert result.first is not None and result.first.key.kind == "param_grad"


def test_one_element_of_a_parameters_gradient() -> None:
    ours = values(3, (128,))
    theirs = ours * NEAR
    theirs[29] *= 0.86
    assert crossed_kink(ours, theirs) is None  # of few elements, one is no outlier
    found = crossed_kink(ours, theirs, least=32)
    assert found is not None and found.crossed == 1 and found.rel_l2 < 1e-6

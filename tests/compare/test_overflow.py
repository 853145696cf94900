"""Numbers beyond the range of one side's dtype leave the verdict open; a NaN that they do not explain is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tensortap as tt
from tensortap.compare.measure.hidden import see_nothing
from tensortap.kernels.summary.visible import padding_of_texts


class Net(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.change(self.up(x)).float().tanh())


def run(path: Path, keep: str, scale: float, model: Net, half: bool = False) -> Path:
    torch.manual_seed(1)
    x = scale * torch.randn(5, 8)
    with tt.capture(model, path, keep=keep), torch.autocast("cpu", torch.float16, enabled=half):
        model(x).float().square().sum().backward()
    return path


@pytest.mark.parametrize("keep", ["tensors", "summary"])
@pytest.mark.parametrize("is_candidate", [True, False])
def test_numbers_beyond_the_range_of_one_side_leave_the_verdict_open(
    tmp_path: Path, keep: str, is_candidate: bool
) -> None:
    long = run(tmp_path / "long", keep, 1e6, Net())
    half = run(tmp_path / "half", keep, 1e6, Net(), half=True)
    result = tt.compare(long, half) if is_candidate else tt.compare(half, long)
    assert (result.verdict, result.births) == ("incomparable", [])
    assert f"the {'candidate' if is_candidate else 'reference'} overflows at up · output 0" in result.sentence


@pytest.mark.parametrize("keep", ["tensors", "summary"])
@pytest.mark.parametrize("half", [False, True])
def test_a_nan_that_sizes_do_not_explain_is_named(tmp_path: Path, keep: str, half: bool) -> None:
    reference = run(tmp_path / "reference", keep, 1.0, Net())
    wrong = Net(lambda x: torch.where(x > 1, x.new_tensor(float("nan")), x))
    result = tt.compare(reference, run(tmp_path / "wrong", keep, 1.0, wrong, half=half))
    assert result.verdict == "diverged" and result.first is not None and result.first.module == ""


def test_a_mistake_before_an_overflow_is_named(tmp_path: Path) -> None:
    class Before(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.first(x))

    def build(slope: float) -> Net:
        model = Before()
        model.first = nn.LeakyReLU(slope)
        return model

    reference = run(tmp_path / "a", "tensors", 1e6, build(0.1))
    result = tt.compare(reference, run(tmp_path / "b", "tensors", 1e6, build(0.2), half=True))
    assert result.verdict == "diverged" and result.first is not None and result.first.module == "first"


def test_padding_of_texts_is_before_or_behind_them() -> None:
    found = padding_of_texts(np.array([[0, 0, 1], [1, 1, 1]], bool))
    assert found is not None and found.tolist() == [[True, True, False], [False] * 3]
    found = padding_of_texts(np.array([[1, 1, 0], [1, 1, 1]]))
    assert found is not None and found.tolist() == [[False, False, True], [False] * 3]
    found = padding_of_texts(np.array([[0, 1, 0, 1, 0]]))
    assert found is not None and found.tolist() == [[True, *[False] * 4]], "zeros within a text mean something else"
    assert padding_of_texts(np.array([[0, 0, 1], [0, 0, 0]])) is None, "0 means that a token is seen"
    assert padding_of_texts(np.array([[0, 2, 1]])) is None


def test_positions_see_nothing_if_one_side_has_the_same_numbers_there() -> None:
    positions = np.array([[True, True, False], [False] * 3])
    ours = np.random.default_rng(0).normal(size=(2, 3, 4))
    theirs = ours.copy()
    theirs[0, :2] = 0.0
    assert see_nothing(positions, ours, theirs)
    theirs[0, :2] = [[1.0, 2.0, 3.0, 4.0]]
    assert see_nothing(positions, ours, theirs)
    theirs[0, 1] += 1
    assert not see_nothing(positions, ours, theirs), "other numbers: a mistake makes these"
    theirs[0, 0], theirs[0, 1] = ours[0, 0], 0.0
    assert see_nothing(positions, ours, theirs), "a window shows something to the first of them"
    theirs[0, :2], theirs[1, 2] = 0.0, 0.0
    assert not see_nothing(positions, ours, theirs), "it differs elsewhere, too"

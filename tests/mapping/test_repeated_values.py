"""A value that one side repeats over the batch and the other holds once: the same, unless the rows differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("paddle")
import paddle

import tensortap as tt
from support import twins
from tensortap.mapping.layouts import common_shape

TOKENS = np.random.default_rng(0).integers(0, 20, (2, 7))


class Attend(torch.nn.Module):
    def forward(self, x: Any, mask: Any) -> Any:
        scores = (x @ x.transpose(1, 2)).unsqueeze(1) + mask
        return (torch.softmax(scores, -1) @ x.unsqueeze(1)).squeeze(1)


class Embedder(torch.nn.Module):
    """Positions and a mask for all rows of the batch at once."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = torch.nn.Embedding(20, 8), torch.nn.Embedding(9, 8)
        self.attend, self.out = Attend(), torch.nn.Linear(8, 4)

    def forward(self, tokens: Any) -> Any:
        positions = torch.arange(tokens.shape[1])[None]
        mask = torch.linspace(-1, 0, tokens.shape[1])[None, None, None]
        return self.out(self.attend(self.words(tokens) + self.positions(positions), mask))


class PaddleAttend(paddle.nn.Layer):
    def forward(self, x: Any, mask: Any) -> Any:
        scores = paddle.matmul(x, x, transpose_y=True).unsqueeze(1) + mask
        return paddle.matmul(paddle.nn.functional.softmax(scores, -1), x.unsqueeze(1)).squeeze(1)


class PaddleEmbedder(paddle.nn.Layer):
    """Positions and a mask for each row of the batch; `shift` moves the positions of the last row: a mistake."""

    def __init__(self, shift: int = 0, slope: float = 1.0) -> None:
        super().__init__()
        self.words, self.positions = paddle.nn.Embedding(20, 8), paddle.nn.Embedding(9, 8)
        self.attend, self.out = PaddleAttend(), paddle.nn.Linear(8, 4)
        self.shift, self.slope = shift, slope

    def forward(self, tokens: Any) -> Any:
        positions = paddle.arange(tokens.shape[1]).unsqueeze(0).tile([tokens.shape[0], 1])
        positions[-1] += self.shift
        mask = paddle.linspace(-1, 0, tokens.shape[1]).reshape([1, 1, 1, -1]).tile([tokens.shape[0], 1, 1, 1])
        mask[-1] *= self.slope
        return self.out(self.attend(self.words(tokens) + self.positions(positions), mask))


def compared(folder: Path, back: bool = False, keep: str = "tensors", **mistake: Any) -> Any:
    torch.manual_seed(0)
    ours, theirs = Embedder(), PaddleEmbedder(**mistake)
    assert tt.transfer(ours, theirs).complete
    runs = [twins.train(m, TOKENS, folder / str(at), keep=keep) for at, m in enumerate((ours, theirs))]
    return tt.compare(*(runs[::-1] if back else runs))


@pytest.mark.parametrize("back", [False, True], ids=["torch first", "paddle first"])
def test_repeated_values_are_measured(tmp_path: Path, back: bool) -> None:
    result = compared(tmp_path, back)
    assert result.verdict == "match", str(result)
    rows = {
        (row["module"], row["kind"]): row for row in result.rows if row["shape_reference"] != row["shape_candidate"]
    }
    plain = {spot: row for spot, row in rows.items() if row["layout"] is None}
    assert plain.keys() == {
        ("positions", "input"),
        ("positions", "output"),
        ("positions", "grad_output"),
        ("attend", "input"),
    }
    assert all(row["exact"] and row["status"] in ("equal", "close") for row in plain.values())
    assert any("the shapes of 4 values differ in axes that one side repeats" in note for note in result.notes)


@pytest.mark.parametrize("back", [False, True], ids=["torch first", "paddle first"])
def test_rows_that_differ_are_a_difference(tmp_path: Path, back: bool) -> None:
    result = compared(tmp_path, back, shift=1)
    assert (result.verdict, result.first.key.module, result.first.key.kind) == ("diverged", "positions", "input")
    assert "is off by" in str(result)


def test_a_mask_that_differs_in_one_row(tmp_path: Path) -> None:
    result = compared(tmp_path, slope=1.001)
    assert (result.verdict, result.first.key.module, result.first.key.path) == ("diverged", "attend", "1")


def test_without_elements_it_is_not_judged(tmp_path: Path) -> None:
    result = compared(tmp_path, keep="summary")
    assert result.verdict == "match", str(result)
    rules = {(row["module"], row["kind"]): row["rule"] for row in result.rows if row["status"] == "unjudged"}
    assert rules["positions", "input"] == "its shape alone differs, and its elements were not kept"


def test_another_number_of_channels_is_another_shape(tmp_path: Path) -> None:
    runs = []
    for name, model in (("t", torch.nn.Linear(4, 6)), ("p", paddle.nn.Linear(4, 3))):
        runs.append(twins.train(model, np.ones((2, 4), np.float32), tmp_path / name, kinds=("output",)))
    result = tt.compare(*runs)
    assert result.counts["shape"] == 1 and result.verdict == "diverged"


@pytest.mark.parametrize(
    ("left", "right", "common"),
    [
        ((1, 12), (2, 12), (2, 12)),
        ((2, 1, 1, 8), (1, 1, 1, 8), (2, 1, 1, 8)),
        ((8,), (2, 8), (2, 8)),
        ((2, 1, 8), (2, 8), (2, 1, 8)),
        ((), (1,), (1,)),
        ((), (3,), None),  # one number is not a row
        ((1, 1), (2, 3), None),
        ((2, 12), (3, 12), None),
        ((2, 12), (12, 2), None),
        ((0, 4), (1, 4), None),
    ],
)
def test_common_shapes(left: tuple[int, ...], right: tuple[int, ...], common: tuple[int, ...] | None) -> None:
    assert common_shape(left, right) == common_shape(right, left) == common

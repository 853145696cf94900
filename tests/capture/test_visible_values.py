"""The first step of a padded batch has a sketch of each value without the positions that a mask hides."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tensortap as tt
from support import fake_gpu
from tensortap.frameworks.torch.framework import Torch
from tensortap.frameworks.torch.ops_reader import OpsReader
from tensortap.kernels.summary.visible import SUMS, along, in_copies, sketch_of_visible

ROWS, LENGTH, WIDTH = 3, 6, 8


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


def recorded(path: Path, mask: Tensor, change: Tensor | None = None) -> tt.Run:
    torch.manual_seed(0)
    model, x = _Model(), torch.randn(ROWS, LENGTH, WIDTH)
    x = x if change is None else x + change[..., None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, path, keep="summary", optimizer=optimizer):
        for _ in range(2):
            model(x, attention_mask=mask).square().mean().backward()
            optimizer.step()
    return tt.open(path)


def padded() -> Tensor:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, :2] = 0
    return mask


def test_values_at_hidden_positions_do_not_count(tmp_path: Path) -> None:
    hidden = (padded() == 0).float()
    runs = [recorded(tmp_path / "a", padded()), recorded(tmp_path / "b", padded(), hidden)]
    values = [run.loop().value("visible", 0, "first") for run in runs]
    assert values[0] == values[1] and values[0] is not None
    assert list(values[0]) == ["0.0.input.0", "0.0.output.0"]
    other = recorded(tmp_path / "c", padded(), torch.ones(ROWS, LENGTH)).loop().value("visible", 0, "first")
    assert other is not None and other["0.0.output.0"] != values[0]["0.0.output.0"]


def test_the_first_step_alone_has_them_and_the_gradient_that_enters(tmp_path: Path) -> None:
    facts = recorded(tmp_path / "a", padded()).loop()
    assert facts.subjects("visible") == ["", "first", "second"]
    assert {fact.step for of in facts.subjects("visible") for fact in facts.changes("visible", of)} == {0}
    root = facts.value("visible", 0)
    assert root is not None and {"0.hidden", "0.0.output.0", "0.0.grad_output.0"} <= set(root)
    assert len(b64decode(root["0.0.output.0"])) == 4 * SUMS


@pytest.mark.parametrize("kernels", [False, True])
def test_tensors_on_a_device_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: bool) -> None:
    """With a reader of plain operations, and with one of kernels that may let reads wait."""
    here = recorded(tmp_path / "here", padded()).loop()
    if kernels:
        monkeypatch.setitem(fake_gpu.ITEMS, "int64", 8)
        fake_gpu.install(monkeypatch)
    else:
        reader = OpsReader()
        monkeypatch.setattr(Torch, "device_reader", lambda self, tensor: reader)
    there = recorded(tmp_path / "there", padded()).loop()
    for subject in ("", "first", "second"):
        ours, theirs = here.value("visible", 0, subject), there.value("visible", 0, subject)
        assert ours is not None and theirs is not None and list(ours) == list(theirs)
        for name in ours:
            if name != "0.hidden":
                values = [np.frombuffer(b64decode(each[name]), "<f4") for each in (ours, theirs)]
                np.testing.assert_allclose(values[0], values[1], rtol=1e-6)


def test_a_batch_without_padding_has_none(tmp_path: Path) -> None:
    assert "visible" not in recorded(tmp_path / "a", torch.ones(ROWS, LENGTH, dtype=torch.long)).loop().names()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((ROWS, LENGTH, WIDTH), (ROWS, LENGTH, 1)),
        ((ROWS, 2, LENGTH, WIDTH), (ROWS, 1, LENGTH, 1)),
        ((ROWS * LENGTH, WIDTH), (ROWS * LENGTH, 1)),
        ((LENGTH, ROWS, WIDTH), (LENGTH, ROWS, 1)),
        ((ROWS, WIDTH), None),
        ((WIDTH,), None),
    ],
)
def test_hidden_positions_are_found_along_the_axes(shape: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    hidden = (padded() == 0).numpy()
    where = along(hidden, shape)
    assert (None if where is None else where.shape) == expected


def test_a_row_of_padding_is_hidden_where_only_the_axis_of_rows_is_left() -> None:
    hidden = (padded() == 0).numpy()
    hidden[2] = True
    where = along(hidden, (ROWS, WIDTH))
    assert where is not None and where.tolist() == [[False], [False], [True]]


def test_the_sketch_is_that_of_zeros_at_hidden_positions() -> None:
    hidden = (padded() == 0).numpy()
    values = np.random.default_rng(0).random((2 * ROWS * LENGTH, WIDTH), np.float32)
    where = in_copies(hidden, values.shape)
    assert where is not None and in_copies(hidden, values[1:].shape) is None
    other = np.where(where, np.float32(7), values)
    assert np.array_equal(sketch_of_visible(values, where), sketch_of_visible(other, where))

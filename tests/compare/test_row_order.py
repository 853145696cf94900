"""The same rows in another order are told from other data, from summaries and from tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.kernels.summary.row_order import digest_of_rows

SAID = "It has the same rows in another order"


def test_the_digest_knows_rows_but_not_their_order() -> None:
    rng = np.random.default_rng(0)
    floats = rng.standard_normal((4, 3, 2)).astype(np.float32)
    for array in (rng.integers(0, 9, (7, 5)), floats, rng.random((5, 7)) < 0.3):
        shuffled = array[rng.permutation(len(array))]
        assert digest_of_rows(array) == digest_of_rows(np.asfortranarray(shuffled))
        assert digest_of_rows(array) != digest_of_rows(array[:, ::-1])
        doubled = np.concatenate([array[:1], array[:-1]])
        assert digest_of_rows(array) != digest_of_rows(doubled)
    assert digest_of_rows(np.ones((1, 4))) is digest_of_rows(np.ones(())) is digest_of_rows(np.ones((0, 2))) is None


def test_parts_of_the_rows_add_up() -> None:
    array = np.arange(24, dtype=np.int64).reshape(6, 4)
    parts = digest_of_rows(array[:2]), digest_of_rows(array[2:])
    assert None not in parts and sum(parts) % 2**64 == digest_of_rows(array)  # type: ignore[arg-type]


def test_long_rows_are_sampled_and_their_order_is_still_left_out() -> None:
    array = np.random.default_rng(0).standard_normal((4, 1 << 18))
    assert digest_of_rows(array) == digest_of_rows(array[::-1])
    assert digest_of_rows(array) != digest_of_rows(array + 1)


def run(path: Path, keep: str, order: list[int], off: float = 0.0) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with tt.capture(model, path, keep=keep) as tap:
        for step in range(2):
            data = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            model(data[order] + off).square().mean().backward()
            tap.step()
    return path


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_another_order_is_named(tmp_path: Path, keep: str) -> None:
    reference = run(tmp_path / "a", keep, [0, 1, 2, 3])
    result = tt.compare(reference, run(tmp_path / "b", keep, [2, 0, 3, 1]))
    assert result.first is not None and result.first.cause == "input"
    assert SAID in result.sentence
    assert SAID not in tt.compare(reference, run(tmp_path / "c", keep, [0, 1, 2, 3], off=0.5)).sentence
    assert SAID not in tt.compare(reference, run(tmp_path / "d", keep, [0, 0, 2, 3])).sentence

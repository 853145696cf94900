"""Two splits of one batch: gradients summed over the step are compared, and what is left out is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tt


def record(path: Path, parts: int, factor: float = 1.0, keep: str = "summary", optimizer: bool = True) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    sgd, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 8)
    with tt.capture(model, path, keep=keep, optimizer=sgd if optimizer else None) as tap:
        for part in x.chunk(parts):
            (factor * model(part).square().mean() / parts).backward()
        sgd.step()
        if not optimizer:
            tap.step()
    return path


@pytest.mark.parametrize("keep", ["summary", "tensors"])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (4, 1), (2, 4)])
def test_summed_gradients_are_compared(tmp_path: Path, ours: int, theirs: int, keep: str) -> None:
    a = record(tmp_path / "a", ours, keep=keep)
    right = tt.compare(a, record(tmp_path / "b", theirs, keep=keep))
    assert right.verdict == "match", right.sentence
    assert "4 gradients summed over a step were compared" in right.sentence
    assert "records of single micro batches are not comparable" in right.sentence
    wrong = tt.compare(a, record(tmp_path / "c", theirs, 1.01, keep))
    assert wrong.verdict == "diverged" and wrong.first is not None
    assert wrong.first.key.kind in ("param_grad", "step_grad")


def test_a_sum_that_was_not_recorded_is_no_match(tmp_path: Path) -> None:
    a, b = (record(tmp_path / str(parts), parts, optimizer=False) for parts in (1, 2))
    found = tt.compare(a, b)
    assert (found.verdict, found.first) == ("incomparable", None)
    assert "capture with optimizer=" in " ".join([found.sentence, *found.notes])

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


class _Attention(nn.Module):
    """A softmax ignores the bias of the keys: its gradient is zero in theory."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        nn.init.zeros_(self.key.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return scores.softmax(-1) @ self.value(x)


def record_attention(path: Path, parts: int, clip: float = 1.0, factor: float = 1.0) -> Path:
    torch.manual_seed(0)
    model, x = _Attention(), torch.randn(8, 16, 8)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tt.capture(model, path, optimizer=adam):
        for _ in range(2):
            for part in x.chunk(parts):
                (factor * model(part).square().mean() / parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            adam.step()
            adam.zero_grad()
    return path


def test_a_sum_that_cancels_out_is_rounding_in_any_split(tmp_path: Path) -> None:
    a = record_attention(tmp_path / "a", 1)
    right = tt.compare(a, record_attention(tmp_path / "b", 2))
    assert right.verdict == "match", right.sentence
    assert "of rounding alone on both sides" in right.sentence and "key · step_grad bias" in right.sentence
    wrong = tt.compare(a, record_attention(tmp_path / "c", 2, factor=1.01))
    assert wrong.first is not None and wrong.first.key.module != "key"


def test_a_parameter_that_rounding_alone_moves_is_explained(tmp_path: Path) -> None:
    right = tt.compare(record_attention(tmp_path / "a", 1), record_attention(tmp_path / "b", 2))
    assert (
        "key · param bias" in right.sentence
        and "the gradients that move it consist of rounding alone" in right.sentence
    )


def test_error_of_single_micro_batches_is_not_known(tmp_path: Path) -> None:
    """Each layer sums in another way for another batch, and nothing shows how much of that came in."""

    def split(path: Path, parts: int, by: float) -> Path:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)), torch.randn(8, 8)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * (1 + by * gradient.sign() * gradient.flip(0).sign()))
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        with tt.capture(model, path, optimizer=sgd):
            for part in x.chunk(parts):
                (model(part).pow(3).mean() / parts).backward()
            sgd.step()
        return path

    reference = split(tmp_path / "a", 2, 0.0)
    right = tt.compare(reference, split(tmp_path / "b", 4, 4e-6))
    assert right.verdict == "match", right.sentence
    assert tt.compare(reference, split(tmp_path / "c", 4, 1e-4)).verdict == "diverged"

"""Real numbers on one side and complex ones on the other are compared as complex ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt


class Model(nn.Module):
    """Passes complex numbers to a module if `imaginary` is given, whose imaginary part is that times the real one."""

    def __init__(self, imaginary: float | None) -> None:
        super().__init__()
        self.first, self.after = nn.Linear(8, 8), nn.Identity()
        self.imaginary = imaginary

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.imaginary is not None:
            y = torch.complex(y, y * self.imaginary)
        result: Tensor = self.after(y).abs().sum()
        return result


def recorded(path: Path, imaginary: float | None, keep: Any) -> Path:
    torch.manual_seed(0)
    model = Model(imaginary)
    with tt.capture(model, path, keep=keep):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).backward()
    return path


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_an_imaginary_part_on_one_side_is_a_difference(tmp_path: Path, keep: str) -> None:
    real, half = recorded(tmp_path / "real", None, keep), recorded(tmp_path / "complex", 0.5, keep)
    for sides in (real, half), (half, real):
        result = tt.compare(*sides)
        assert result.first is not None and str(result.first.key).startswith("after · input 0"), result.sentence
        assert "complex64" in result.sentence
    if keep == "tensors":
        assert tt.compare(real, half).births[0].rel_l2 == pytest.approx(0.5)


def test_complex_numbers_without_imaginary_part_are_the_real_ones(tmp_path: Path) -> None:
    real, zero = recorded(tmp_path / "real", None, "tensors"), recorded(tmp_path / "complex", 0.0, "tensors")
    for sides in (real, zero), (zero, real):
        result = tt.compare(*sides)
        assert result.verdict == "match", result.sentence
        assert any("complex64" in note for note in result.notes), result.notes

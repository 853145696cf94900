"""A check in bfloat16 names the module that computes GELU by tanh where the reference does it by erf."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tt


class Inline(nn.Module):
    """Computes the activation in its own code, after the module that it calls."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self.dense = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.dense(x), approximate=self.approximate)


def model_with(approximate: str, inline: bool) -> nn.Module:
    torch.manual_seed(0)
    if inline:
        model = nn.Sequential(Inline(approximate), nn.Linear(64, 4))
    else:
        parts = nn.Linear(32, 64), nn.GELU(approximate=approximate), nn.Linear(64, 4)
        model = nn.Sequential(*parts)
    with torch.no_grad():
        next(model.parameters()).mul_(5)  # activations as large as a trained model's
    return model.bfloat16()


def step(model: nn.Module) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    model(x).float().square().mean().backward()


@pytest.mark.parametrize(("inline", "place"), [(False, "1"), (True, "0")])
def test_the_other_gelu_is_named(tmp_path: Path, inline: bool, place: str) -> None:
    reference = model_with("none", inline)
    with tt.capture(reference, tmp_path / "a", keep="tensors"):
        step(reference)
    for approximate, named in (("none", []), ("tanh", [place])):
        model = model_with(approximate, inline)
        with tt.check(model, tmp_path / "a") as check:
            step(model)
        assert [birth.module for birth in check.result.births] == named, check.result.sentence

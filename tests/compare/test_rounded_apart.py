"""Single elements that the own code of a container rounds to the other side in a short dtype are no mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt

WIDTH = 64


class _Block(nn.Module):
    """Computes in bfloat16 between its modules, and keeps the result in float32."""

    def __init__(self, flipped: int, scale: float) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self._flipped, self._scale = flipped, scale

    def forward(self, x: Tensor) -> Tensor:
        rough = self.first(x).bfloat16()
        flat = rough.detach().clone().view(-1)
        flat.view(torch.int16)[: self._flipped] += 1  # the next number
        values = rough.float() + (flat.view_as(rough).float() - rough.detach().float())
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.head(self.norm(values * self._scale))
        return out


def verdict(path: Path, keep: str, flipped: int = 0, scale: float = 1.0) -> tt.Comparison:
    for name, model in (("reference", _Block(0, 1.0)), ("candidate", _Block(flipped, scale))):
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        batch = torch.randn(8, WIDTH)
        with tt.capture(model, path / name, keep=keep) as tap:
            model(batch).float().square().mean().backward()
            tap.step()
    return tt.compare(path / "reference", path / "candidate")


@pytest.mark.parametrize("keep", ["summary", "tensors"])
@pytest.mark.parametrize("flipped", [1, 2])
def test_a_few_elements_may_be_rounded_to_the_other_side(tmp_path: Path, keep: str, flipped: int) -> None:
    assert verdict(tmp_path, keep, flipped).verdict == "match"


@pytest.mark.parametrize("keep", ["summary", "tensors"])
@pytest.mark.parametrize(("flipped", "scale"), [(8 * WIDTH, 1.0), (0, 1.001)])
def test_all_elements_may_not(tmp_path: Path, keep: str, flipped: int, scale: float) -> None:
    result = verdict(tmp_path, keep, flipped, scale)
    assert result.verdict == "diverged" and result.first is not None and result.first.module == ""

"""A whole view of another tensor that is changed in place keeps its gradient, in any memory format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt


class _Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv(x)
        return made[:, :4]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = _Sliced(), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        y += x[:, :1]
        return self.last(y)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_gradient_of_a_whole_view_that_changes_in_place(format: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = _Model().to(memory_format=format)
    with tt.capture(model, keep="tensors") as tap:
        model(torch.randn(2, 3, 5, 5).contiguous(memory_format=format)).square().sum().backward()
    found = [record.key.module for record in tap.run.records() if record.key.kind == "grad_output"]
    assert "part" in found, found

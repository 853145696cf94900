"""One projection of queries, keys and values against three: the same maths in other modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt
from tensortap.core.records import Comparison

WIDTH = 16


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.fused = nn.Linear(WIDTH, WIDTH), fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        return self.out(torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v)


class Model(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.first, self.attention, self.head = nn.Linear(8, WIDTH), Attention(fused), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(x + self.attention(x))


def captured(path: Path, fused: bool, wrong: bool = False) -> Path:
    torch.manual_seed(0)
    model = Model(True)
    if not fused:
        weights = {}
        for name, value in model.state_dict().items():
            parts = zip("qkv", value.chunk(3), strict=True) if ".qkv." in name else [("qkv", value)]
            weights |= {name.replace("qkv", part): each.clone() for part, each in parts}
        model = Model(False)
        model.load_state_dict(weights)
    if wrong:
        with torch.no_grad():
            model.attention.k.weight.mul_(1.05)
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    kinds = ("input", "output", "grad_output", "param_grad", "param")
    with tt.capture(model, path, keep="tensors", kinds=kinds):
        model(x).square().mean().backward()
    return path


def compared(tmp_path: Path, wrong: bool, mapped: bool) -> Comparison:
    runs = captured(tmp_path / "a", True), captured(tmp_path / "b", False, wrong)
    return tt.compare(*runs, mapping={}) if mapped else tt.compare(*runs)


@pytest.mark.parametrize("mapped", [False, True], ids=["by name", "mapped"])
def test_they_match(tmp_path: Path, mapped: bool) -> None:
    assert compared(tmp_path, wrong=False, mapped=mapped).verdict == "match"


def test_a_wrong_weight_is_attributed_to_the_attention_and_what_was_not_compared_is_named(tmp_path: Path) -> None:
    result = compared(tmp_path, wrong=True, mapped=False)
    assert result.first is not None and result.first.module == "attention"
    assert "But attention.qkv of the reference and attention.q and 2 more of the candidate" in result.sentence


def test_a_wrong_weight_is_named_if_weights_are_joined_by_a_mapping(tmp_path: Path) -> None:
    result = compared(tmp_path, wrong=True, mapped=True)
    assert result.first is not None and (result.first.module, result.first.key.kind) == ("attention.qkv", "param")
    assert "out_features" not in result.sentence, "sizes of other modules"

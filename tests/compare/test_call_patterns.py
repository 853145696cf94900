"""Modules that are called in another pattern for the same maths are noted, and never named."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt
from tensortap.core.records import MODULE_KINDS

KINDS = tuple(kind for kind in MODULE_KINDS if kind != "step_grad")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.chunks = 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.down(self.act(self.up(part))) for part in x.chunk(self.chunks, 1)], 1)


class Experts(nn.Module):
    """Each token goes to one of four experts, one expert after the other or all tokens at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.randn(4, 8, 8) / 3), nn.SiLU()
        self.batched = False

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        chosen = torch.arange(len(flat)) % 4
        if self.batched:
            return self.act(torch.einsum("td,tdo->to", flat, self.weight[chosen])).reshape(x.shape)
        result = torch.zeros_like(flat)
        for expert in range(4):
            result = result.index_copy(
                0, (chosen == expert).nonzero()[:, 0], self.act(flat[chosen == expert] @ self.weight[expert])
            )
        return result.reshape(x.shape)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.experts, self.head = nn.LayerNorm(8), Mlp(), Experts(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        return self.head(x + self.experts(x))


def in_chunks(model: Model) -> None:
    model.mlp.chunks = 3


def batched(model: Model) -> None:
    model.experts.batched = True


def wrong_and_in_chunks(model: Model) -> None:
    inner = model.mlp.forward
    model.mlp.chunks = 3
    model.mlp.forward = MethodType(lambda self, x: 1.1 * inner(x), model.mlp)  # type: ignore[method-assign]


def step(model: nn.Module) -> None:
    random = torch.Generator().manual_seed(1)
    model(torch.randn(2, 6, 8, generator=random)).square().mean().backward()


def made(change: Any = None) -> Model:
    torch.manual_seed(0)
    model = Model()
    if change is not None:
        change(model)
    return model


def compared(change: Any, way: str, folder: Path) -> Any:
    keep = "summary" if way == "summary" else "tensors"
    with tt.capture(model := made(), folder / "a", keep=keep, kinds=KINDS):
        step(model)
    if way == "isolated":
        with tt.check(model := made(change), folder / "a") as check:
            step(model)
        return check.result
    with tt.capture(model := made(change), folder / "b", keep=keep, kinds=KINDS):
        step(model)
    return tt.compare(folder / "a", folder / "b")


@pytest.mark.parametrize("way", ["tensors", "summary", "isolated"])
@pytest.mark.parametrize("change", [in_chunks, batched])
def test_another_call_pattern_is_noted(change: Any, way: str, tmp_path: Path) -> None:
    result = compared(change, way, tmp_path)
    assert result.verdict == "match", result.sentence
    module = "mlp.act" if change is in_chunks else "experts.act"
    (note,) = [note for note in result.notes if "records of single calls are not comparable" in note]
    assert note.startswith(f"{module} is called "), note
    assert ("joined, the outputs of 3 of 3 agree" in note) == (way == "tensors" and change is in_chunks), note


@pytest.mark.parametrize("way", ["tensors", "summary", "isolated"])
def test_a_mistake_beside_it_is_named_outside_the_inner_modules(way: str, tmp_path: Path) -> None:
    result = compared(wrong_and_in_chunks, way, tmp_path)
    assert (result.verdict, result.first.module) == ("diverged", "mlp"), result.sentence

"""Experts may run on tokens in any order: what is inside them is not compared then, and what they return is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt
from tensortap.core.records import Comparison

_WIDTH, _TOKENS, _EXPERTS, _EACH = 8, 48, 4, 2


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_EXPERTS, _WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = (x @ self.weight.T).softmax(-1).topk(_EACH, -1)
        return weights, chosen


class _Experts(nn.Module):
    """Computes all choices at once: by token, or sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(_EXPERTS, _WIDTH, 2 * _WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(_EXPERTS, _WIDTH, _WIDTH) / 3)
        self.act = nn.SiLU()
        self.sorts, self.swaps, self.shifts = False, False, 0

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        expert = chosen.reshape(-1)
        order = expert.argsort(stable=True) if self.sorts else torch.arange(len(expert))
        expert = expert[order]
        gate, up = (x[order // _EACH, None] @ self.up[expert]).squeeze(1).chunk(2, -1)
        if self.swaps:
            gate, up = up, gate
        made = ((self.act(gate) * up).roll(self.shifts, 0)[:, None] @ self.down[expert]).squeeze(1)
        return torch.zeros_like(x).index_add(0, order // _EACH, made * weights.reshape(-1)[order, None])


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.experts = nn.Linear(_WIDTH, _WIDTH), _Router(), _Experts()
        self.last = nn.Linear(_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.experts(x, *self.router(x)))


class _Training:
    def __init__(self, **changes: Any) -> None:
        torch.manual_seed(0)
        self.model = _Model()
        for name, value in changes.items():
            setattr(self.model.experts, name, value)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def run(self) -> None:
        for step in range(2):
            x = torch.randn(_TOKENS, _WIDTH, generator=torch.Generator().manual_seed(step))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def _compared(folder: Path, way: str, **changes: Any) -> Comparison:
    keep = "summary" if way == "summary" else "tensors"
    ours, theirs = _Training(), _Training(**changes)
    with tt.capture(ours.model, folder / "a", keep=keep, optimizer=ours.optimizer):
        ours.run()
    if way == "isolated":
        with tt.check(theirs.model, folder / "a", optimizer=theirs.optimizer) as check:
            theirs.run()
        return check.result
    with tt.capture(theirs.model, folder / "b", keep=keep, optimizer=theirs.optimizer):
        theirs.run()
    return tt.compare(folder / "a", folder / "b")


@pytest.fixture(params=["tensors", "summary", "isolated"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_another_order_of_tokens_inside_experts_is_no_divergence(tmp_path: Path, way: str) -> None:
    found = _compared(tmp_path, way, sorts=True)
    assert found.verdict == "match", found.sentence
    assert any("same tokens in another order" in note for note in found.notes)


@pytest.mark.parametrize("mistake", [{"swaps": True}, {"shifts": 1}])
def test_a_mistake_beside_another_order_is_named(tmp_path: Path, way: str, mistake: dict[str, Any]) -> None:
    found = _compared(tmp_path, way, sorts=True, **mistake)
    assert found.first is not None and found.first.module == "experts", found.sentence

"""A check around a user's own step: what it finds, what it leaves alone, what it says when it cannot work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from support.tapping import ALL_KINDS, hooks_on
from torch import nn

import tensortap as tt

TOKENS = torch.tensor([[1, 5, 2], [0, 3, 3]])
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "in-place": (zoo.InPlaceModule, (zoo.batch(),)),
    "in-place after": (zoo.InPlaceAfter, (zoo.batch(),)),
    "behind autograd": (zoo.BehindAutograd, (zoo.batch(),)),
    "views": (zoo.Views, (zoo.batch(),)),
    "structured": (zoo.Structured, (zoo.batch(),)),
    "shared": (zoo.Shared, (zoo.batch(),)),
    "pass-through": (zoo.PassThrough, (zoo.batch(),)),
    "frozen": (zoo.Frozen, (TOKENS,)),
    "statistics": (zoo.Statistics, (zoo.batch(),)),
    "residual": (zoo.Residual, (zoo.batch(),)),
    "checkpointed": (lambda: zoo.Checkpointed("plain"), (zoo.batch().requires_grad_(),)),
    "reentrant": (lambda: zoo.Checkpointed("reentrant"), (zoo.batch().requires_grad_(),)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (zoo.batch(),)),
    "lstm": (lambda: FirstOf(nn.LSTM(4, 6, 2, batch_first=True)), (zoo.batch(),)),
    "attention": (lambda: OfItself(nn.MultiheadAttention(4, 2, batch_first=True)), (zoo.batch(),)),
}


class FirstOf(nn.Module):
    """Uses the first thing that a module returns, and the states a little."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (h, c) = self.inner(x)
        return self.head(out) + h.sum() + c.mean()


class OfItself(nn.Module):
    """Hands one tensor over three times."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def built(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name][0]()


def step(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    loss = zoo.loss_of(model(*inputs))
    loss.backward()
    return loss


def reference_of(name: str, path: Path, kinds: tuple[str, ...] = ALL_KINDS) -> Path:
    torch.manual_seed(1)
    with tt.capture(built(name), path, keep="tensors", kinds=kinds) as tap:
        step(tap._tree.sites[0].owner, *MODELS[name][1])
    return path


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_agrees_with_itself(name: str, isolate: bool, run_path: Path) -> None:
    reference = reference_of(name, run_path)
    model, inputs = built(name), MODELS[name][1]
    torch.manual_seed(1)
    with tt.check(model, reference, isolate=isolate) as check:
        step(model, *inputs)
    assert check.result.verdict == "match", check.result
    assert check.result.isolated == isolate
    assert not check.result.unmatched, check.result.unmatched[:5]
    worst = max((row["rel_l2"] for row in check.result.rows), default=0.0)
    assert worst < 1e-6

"""Losses that one side backpropagates one after the other, and the other side at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap as tt

_KEEP = pytest.mark.parametrize("keep", ["summary", "tensors"])


class TwoTasks(nn.Module):
    def __init__(self, detaches: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.SiLU())
        self.one, self.other, self.detaches = nn.Linear(24, 3), nn.Linear(24, 2), detaches

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.one(h), self.other(h.detach() if self.detaches else h)


def recorded(keep: str, at_once: bool, weight: float = 1.0, detaches: bool = False, optimized: bool = True) -> Any:
    torch.manual_seed(0)
    model, x = TwoTasks(detaches), torch.randn(16, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = ["input", "output", "grad_input", "grad_output", "param_grad", *["step_grad"] * optimized]
    with tt.capture(model, keep=keep, kinds=kinds, optimizer=optimizer if optimized else None) as tap:
        for _ in range(2):
            optimizer.zero_grad()
            one, other = model(x)
            losses = F.cross_entropy(one, torch.arange(16) % 3), weight * F.mse_loss(other, x[:, :2])
            if at_once:
                sum(losses, torch.zeros(())).backward()
            else:
                losses[0].backward(retain_graph=True)
                losses[1].backward()
            optimizer.step()
            if not optimized:
                tap.step()
    return tap.run


@_KEEP
def test_the_sum_of_two_losses_may_go_back_at_once(keep: str) -> None:
    apart, at_once = recorded(keep, False), recorded(keep, True)
    for sides in ((apart, at_once), (at_once, apart)):
        found = tt.compare(*sides)
        assert (found.verdict, found.first) == ("match", None), found.sentence


@_KEEP
def test_a_mistake_in_one_of_them_is_found(keep: str) -> None:
    apart = recorded(keep, False)
    weighted = tt.compare(apart, recorded(keep, True, weight=1.1))
    assert weighted.first is not None and weighted.first.module == "", weighted.sentence
    detached = tt.compare(apart, recorded(keep, True, detaches=True))
    assert detached.first is not None, detached.sentence


def test_without_an_optimizer_nothing_says_that_the_sums_agree() -> None:
    found = tt.compare(recorded("tensors", False, optimized=False), recorded("tensors", True, optimized=False))
    assert found.verdict != "match", found.sentence

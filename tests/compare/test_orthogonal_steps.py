"""Optimizers that make steps orthogonal compute in bfloat16, and enlarge small singular values with all their noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim has no Muon")
KINDS = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "step_grad")


def moved(gradient: Tensor) -> Tensor:
    """Return a gradient as another order of sums makes it."""
    signs = torch.randint(0, 2, gradient.shape, generator=torch.Generator().manual_seed(5)) * 2 - 1
    return gradient * (1 + 2.0**-23 * signs)


def other_step(optimizer: torch.optim.Optimizer) -> None:
    """The step of one matrix is a fifth too long."""
    weight = optimizer.param_groups[0]["params"][1]
    before, step = weight.detach().clone(), optimizer.step

    def longer(closure: Any = None) -> None:
        before.copy_(weight.detach())
        step()
        with torch.no_grad():
            weight.add_(weight - before, alpha=0.2)

    optimizer.step = longer  # type: ignore[method-assign]


def trained(watch: Callable[..., Any], noisy: bool = False, wrong: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 64, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    if noisy:
        for parameter in model.parameters():
            parameter.register_hook(moved)
    if wrong:
        other_step(optimizer)
    with watch(model, optimizer) as watching:
        for seed in range(3):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
    return watching


def recorded(keep: str, **options: bool) -> Any:
    return trained(
        lambda model, optimizer: tt.capture(model, keep=keep, kinds=KINDS, optimizer=optimizer), **options
    ).run


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_noise_of_gradients_grows_in_orthogonal_steps(keep: str) -> None:
    reference = recorded(keep)
    found = tt.compare(reference, recorded(keep, noisy=True))
    assert found.verdict == "match", found.sentence
    assert max(row["rel_l2"] for row in found.rows if row["kind"] == "param") > 1e-5
    wrong = tt.compare(reference, recorded(keep, noisy=True, wrong=True))
    assert wrong.first is not None and wrong.first.module == "2", wrong.sentence


def test_a_check_allows_for_it() -> None:
    reference = recorded("tensors")
    for options in ({}, {"noisy": True}):
        found = trained(lambda m, o: tt.check(m, reference, optimizer=o), **options).result
        assert found.verdict == "match", found.sentence
    wrong = trained(lambda m, o: tt.check(m, reference, optimizer=o), noisy=True, wrong=True).result
    assert wrong.first is not None and wrong.first.module == "2", wrong.sentence

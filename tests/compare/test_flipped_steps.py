"""Elements of a parameter whose step rounding decides: an optimizer divides a gradient by its size, however small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_runs import Seen, values, write

import tensortap as tt
from tensortap.compare.translate.activations import ActivationSums, is_relu_between

_RATE = np.float32(1e-3)
_PLACE = (5, 6, 1)


def write_step(path: Path, before: Any, gradient: Any, after: Any) -> Path:
    seen = [
        Seen("part", before, "param", path="weight"),
        Seen("part", gradient, "param_grad", path="weight"),
        Seen("part", after, "param", path="weight", call=1),
    ]
    return write(path, seen)


def update(path: Path, sign: float, rate: float = 1.0) -> Path:
    """One step of Adam over a kernel with rows of three elements, one of them with a gradient of rounding alone."""
    before, gradient = values(1, (256, 256, 3)) / 30, values(2, (256, 256, 3))
    before[5, 6] = [2e-4, 3e-4, -2e-4]
    gradient *= np.float32(1 + (sign > 0) * 2**-23)
    gradient[_PLACE] = np.float32(sign * 1e-8)
    after = before - np.float32(rate) * _RATE * np.sign(gradient)
    return write_step(path, before, gradient, after)


def test_a_short_row_with_a_flipped_step_is_no_divergence(tmp_path: Path) -> None:
    found = tt.compare(update(tmp_path / "a", 1.0), update(tmp_path / "b", -1.0))
    assert found.verdict == "match", found.sentence


def test_an_element_further_off_than_steps_go_is_wrong(tmp_path: Path) -> None:
    found = tt.compare(update(tmp_path / "a", 1.0), update(tmp_path / "b", -1.0, rate=1.5))
    assert found.first is not None and found.first.cause == "optimizer", found.sentence


def update_by_sign(path: Path, flipped: int) -> Path:
    """One step by the sign of a moment, as Lion's: some elements of it are nearly zero, though the gradient is not."""
    before, gradient = values(4, (48, 48)) / 10, values(5, (48, 48))
    moment = gradient.copy()
    moment.reshape(-1)[:flipped] *= -1
    after = before - _RATE * np.sign(moment)
    gradient = gradient * np.float32(1 + bool(flipped) * 2**-23)
    return write_step(path, before, gradient, after)


def test_few_steps_by_the_sign_of_a_moment_may_flip(tmp_path: Path) -> None:
    reference = update_by_sign(tmp_path / "a", 0)
    found = tt.compare(reference, update_by_sign(tmp_path / "b", 2))
    assert found.verdict == "match", found.sentence
    wrong = tt.compare(reference, update_by_sign(tmp_path / "c", 40))
    assert wrong.first is not None and wrong.first.cause == "optimizer", wrong.sentence


@pytest.mark.parametrize("cut", [0.0, 0.1])
def test_a_relu_is_known_from_summaries(cut: float) -> None:
    x = values(3, (64, 64))
    y = np.where(x > cut, x, 0)

    def sums(of: np.ndarray) -> ActivationSums:  # type: ignore[type-arg]
        return ActivationSums(of.size, np.count_nonzero(of == 0), of.min(), of.max(), of.mean(), np.abs(of).sum())

    assert is_relu_between(sums(x), sums(y)) == (not cut)
    assert not is_relu_between(sums(x), sums(np.abs(x)))


def update_vector(path: Path, flipped: int) -> Path:
    """One step by the sign of a moment, of a norm's weight."""
    before, gradient = values(6, (32,)) / 10 + 1, values(7, (32,))
    moment = gradient.copy()
    moment[:flipped] *= -1
    gradient = gradient * np.float32(1 + bool(flipped) * 2**-23)
    return write_step(path, before, gradient, before - _RATE * np.sign(moment))


def test_an_element_of_a_short_vector_may_flip(tmp_path: Path) -> None:
    reference = update_vector(tmp_path / "a", 0)
    found = tt.compare(reference, update_vector(tmp_path / "b", 1))
    assert found.verdict == "match", found.sentence
    wrong = tt.compare(reference, update_vector(tmp_path / "c", 16))
    assert wrong.first is not None and wrong.first.cause == "optimizer", wrong.sentence


class _OwnAdamW(torch.optim.Optimizer):
    """AdamW as its paper has it."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (one, two), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                count = state["count"] = state.get("count", 0) + 1
                m = state["m"] = one * state.get("m", 0.0) + (1 - one) * p.grad
                v = state["v"] = two * state.get("v", 0.0) + (1 - two) * p.grad**2
                step = m / (1 - one**count) / ((v / (1 - two**count)).sqrt() + group["eps"])
                p.copy_(p - lr * (step + group["weight_decay"] * p))


def trained(path: Path, optimizer: Any, lr: float = 1e-3) -> Path:
    """Three steps; a norm removes the bias before it, so that its gradient consists of rounding."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    chosen = optimizer(model.parameters(), lr=lr, weight_decay=0.01)
    with tt.capture(model, path, optimizer=chosen):
        for x in torch.randn(3, 32, 8):
            model(x).square().mean().backward()
            chosen.step()
            chosen.zero_grad()
    return path


def test_another_class_may_implement_the_same_optimizer(tmp_path: Path) -> None:
    reference = trained(tmp_path / "a", torch.optim.AdamW)
    found = tt.compare(reference, trained(tmp_path / "b", _OwnAdamW))
    assert found.verdict == "match", found.sentence
    wrong = tt.compare(reference, trained(tmp_path / "c", _OwnAdamW, lr=1.01e-3))
    assert wrong.first is not None and wrong.first.cause == "optimizer", wrong.sentence
    other = tt.compare(reference, trained(tmp_path / "d", torch.optim.Adam))
    assert other.first is not None and other.first.cause == "optimizer", other.sentence

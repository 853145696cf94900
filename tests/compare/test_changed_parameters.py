"""Parameters that something but the optimizer changed between two steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import tensortap as tt


class _Averaged(nn.Module):
    """A network and a moving average of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.average(x).detach()


def record(path: Path, between: Callable[[int, _Averaged], None]) -> Path:
    torch.manual_seed(0)
    model = _Averaged()
    adam = torch.optim.AdamW(model.net.parameters(), lr=1e-2)
    with tt.capture(model, path, optimizer=adam):
        for step, x in enumerate(torch.randn(3, 6, 4)):
            model(x).square().sum().backward()
            adam.step()
            adam.zero_grad()
            between(step, model)
    return path


@torch.no_grad()
def _average(decay: float, model: _Averaged) -> None:
    for kept, new in zip(model.average.parameters(), model.net.parameters(), strict=True):
        kept.lerp_(new, 1 - decay)


def test_a_moving_average_with_another_decay(tmp_path: Path) -> None:
    ours, theirs = (
        record(tmp_path / str(decay), lambda _, model, decay=decay: _average(decay, model)) for decay in (0.5, 0.9)
    )
    result = tt.compare(ours, theirs)
    assert result.first is not None and result.first.module == "average.0"
    assert "No optimizer holds its " in result.sentence and "such as a moving average" in result.sentence


def test_a_parameter_that_is_initialised_again(tmp_path: Path) -> None:
    @torch.no_grad()
    def again(step: int, model: _Averaged) -> None:
        if step == 1:
            model.net[0].weight.copy_(model.net[0].weight.flip(0))

    result = tt.compare(record(tmp_path / "a", lambda *_: None), record(tmp_path / "b", again))
    assert result.first is not None and result.first.module == "net.0" and result.first.key.step == 2
    assert "times as far as the reference's since the step before: something but the optimizer" in result.sentence


def test_nothing_is_said_of_a_module_that_is_wrong_itself(tmp_path: Path) -> None:
    def other(step: int, model: _Averaged) -> None:
        if step == 1:
            model.net[1].forward = torch.sin  # type: ignore[method-assign]

    result = tt.compare(record(tmp_path / "a", lambda *_: None), record(tmp_path / "b", other))
    assert result.first is not None and result.first.module == "net.1"
    assert "optimizer" not in result.sentence

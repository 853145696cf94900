"""Micro steps of programs that call parts of a model, never its root."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import everything
from tensortap.core.records import Key


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.decoder(self.encoder(batch)) - batch).square().mean()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.training_step(batch)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


def tapped(train: Callable[[Autoencoder, int], Any], micro_steps: int = 3, **options: Any) -> Any:
    model = Autoencoder()
    with tt.capture(model, **options) as tap:
        for step in range(2):
            for micro in range(micro_steps):
                train(model, 10 * step + micro)
            tap.step()
    return tap.run


def counts(keys: Iterable[Key]) -> set[tuple[int, int, int]]:
    return {(key.step, key.micro, key.call) for key in keys}


KINDS = [("output",), ("output", "grad_output"), ("output", "param_grad"), ("output", "grad_output", "param_grad")]


@pytest.mark.parametrize("kinds", KINDS)
def test_parts_count_micro_steps_as_the_root_does(kinds: tuple[str, ...]) -> None:
    parts = tapped(lambda model, seed: model.training_step(batch(seed)).backward(), kinds=kinds)
    whole = tapped(lambda model, seed: model(batch(seed)).backward(), kinds=kinds)
    expected = {key: value for key, value in everything(whole).items() if key.module}
    assert everything(parts) == expected
    assert counts(expected) == {(step, micro, 0) for step in (0, 1) for micro in (0, 1, 2)}


def test_recurrent_calls_are_one_micro_step() -> None:
    def train(model: Autoencoder, seed: int) -> None:
        state = batch(seed)
        for _ in range(3):
            state = model.decoder(model.encoder(state))
        state.sum().backward()

    assert counts(everything(tapped(train, kinds="output"))) == {
        (step, micro, call) for step in (0, 1) for micro in (0, 1, 2) for call in (0, 1, 2)
    }


def test_parts_beside_the_root_belong_to_its_micro_step() -> None:
    def train(model: Autoencoder, seed: int) -> None:
        extra = model.encoder(batch(seed + 100)).sum()
        (model(batch(seed)) + extra).backward()

    keys = everything(tapped(train, kinds="output"))
    assert counts(key for key in keys if key.module == "") == {(s, m, 0) for s in (0, 1) for m in (0, 1, 2)}
    assert counts(key for key in keys if key.module == "encoder") == {
        (step, micro, call) for step in (0, 1) for micro in (0, 1, 2) for call in (0, 1)
    }


def test_two_forwards_of_the_root_before_one_backward_are_two_micro_steps() -> None:
    def train(model: Autoencoder, seed: int) -> None:
        (model(batch(seed)) + model(batch(seed + 1))).backward()

    assert counts(everything(tapped(train, 1, kinds="output"))) == {(s, m, 0) for s in (0, 1) for m in (0, 1)}


def test_a_loop_over_parts_that_counts_no_steps_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model):
        for seed in range(4):
            model.training_step(batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert ("tap.step()" in capsys.readouterr().err) == (seed == 1)


def test_paddle() -> None:
    paddle = pytest.importorskip("paddle")
    model = paddle.nn.LayerDict({"encoder": paddle.nn.Linear(4, 3), "decoder": paddle.nn.Linear(3, 4)})
    with tt.capture(model, kinds="output") as tap:
        for _ in range(2):
            model["decoder"](model["encoder"](paddle.ones([2, 4]))).sum().backward()
    assert counts(everything(tap.run)) == {(0, 0, 0), (0, 1, 0)}

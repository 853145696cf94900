"""What users combine with taps inside: several sizes, autocast, compiled parts, two models, taps in a row."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.compiling import KINDS, NONE, differences, graph_breaks, graphs, seen_of, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

BACKEND = os.environ.get("TENSORTAP_TEST_BACKEND", "aot_eager")
"""Inductor takes minutes here, so it is tried by hand."""
SAME_BITS = BACKEND == "aot_eager"


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(width, 16), Body(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(width: int = 8) -> Any:
    torch.manual_seed(0)
    return Net(width)


def batch(rows: int = 6, width: int = 8) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * width).view(rows, width)


def step(model: Any) -> torch.Tensor:
    return model(batch()).square().mean()


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=BACKEND, **options)


def assert_same(eager: Any, inside: Any) -> None:
    found = differences(eager, inside)
    assert found == NONE if SAME_BITS else not found["missing"] + found["extra"]
    assert seen_of(eager) == seen_of(inside)


@pytest.mark.parametrize("dynamic", [None, True])
def test_batches_of_several_sizes(dynamic: bool | None) -> None:
    def run(model: Any, **options: Any) -> Any:
        with tt.capture(model, None, kinds=KINDS, on_error="raise", **options) as tap:
            for rows in (6, 3, 5, 7):
                model(batch(rows)).square().mean().backward()
                tap.step()
        return tap

    assert_same(run(build()), run(compiled(build(), dynamic=dynamic, fullgraph=True), compiled="inside"))
    assert graphs() == (1 if dynamic else 2) and graph_breaks() == 0


def test_autocast_around_and_inside_the_graph() -> None:
    class Mixed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.body(self.embed(x))
            return self.head(x.float())

    def around(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch())
        return output.float().square().mean()

    cases: list[tuple[Callable[[], Any], Any]] = [(Mixed, step), (Net, around)]
    for make, one_step in cases:
        torch.manual_seed(0)
        eager = train(make(), one_step)
        torch.manual_seed(0)
        assert_same(eager, train(compiled(make(), fullgraph=True), one_step, compiled="inside"))
    assert graph_breaks() == 0


@pytest.mark.parametrize("place", ["wrapper", "in place"])
def test_one_compiled_part_in_an_uncompiled_model(place: str) -> None:
    model = build()
    if place == "wrapper":
        model.body = compiled(model.body)
    else:
        model.body.compile(backend=BACKEND)
    assert_same(train(build(), step), train(model, step, compiled="inside"))


def test_two_compiled_models_each_with_its_tap() -> None:
    first, second = compiled(build()), compiled(build(width=5))
    with (
        tt.capture(first, None, kinds=KINDS, on_error="raise", compiled="inside") as one,
        tt.capture(second, None, kinds=KINDS, on_error="raise", compiled="inside") as other,
    ):
        for _ in range(2):
            step(first).backward()
            second(batch(width=5)).square().mean().backward()
            one.step()
            other.step()
    assert_same(train(build(), step), one)
    assert_same(train(build(width=5), lambda model: model(batch(width=5)).square().mean()), other)


def test_two_compiled_models_of_which_one_is_tapped() -> None:
    first, second = compiled(build()), compiled(build())
    plain = step(second)
    with tt.capture(first, None, kinds=KINDS, on_error="raise", compiled="inside") as tap:
        for _ in range(2):
            step(first).backward()
            assert torch.equal(step(second), plain)
            tap.step()
    assert_same(train(build(), step), tap)


@pytest.mark.parametrize("how", ["wrapper", "in place"])
def test_a_model_that_is_compiled_after_the_tap_was_opened(how: str) -> None:
    model = build()
    with tt.capture(model, None, kinds=KINDS, on_error="raise", compiled="inside") as tap:
        step(model).backward()
        tap.step()
        if how == "wrapper":
            called = compiled(model)
        else:
            model.compile(backend=BACKEND)
            called = model
        step(called).backward()
        tap.step()
    found = differences(train(build(), step), tap)
    assert found == NONE if SAME_BITS else not found["missing"] + found["extra"]
    assert graphs() >= 1


def test_a_tap_that_is_opened_again() -> None:
    model = compiled(build())
    eager = train(build(), step)
    for _ in range(2):
        model.zero_grad()
        assert_same(eager, train(model, step, compiled="inside"))
        step(model)

"""A check of a model under autocast against float32: rounding is no mistake, and mistakes are still found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tensortap as tt
from tensortap.core.records import MODULE_KINDS as ALL_KINDS
from tensortap.core.records import Comparison

KINDS = tuple(kind for kind in ALL_KINDS if kind != "step_grad")
EXPERTS, WIDTH, TOKENS = 8, 16, 512


class Router(nn.Module):
    """Returns scores, weights and indices of the two best experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.best = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = functional.linear(x, self.weight).float()
        chosen = torch.topk(scores, 2, dim=-1, largest=self.best).indices
        return scores, scores.softmax(-1).gather(-1, chosen), chosen


class Model(nn.Module):
    """Routes tokens, and hands the cosines of two projections, which cancel out, to a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.left, self.right = Router(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.sharp = nn.LayerNorm(2), 1.0

    def forward(self, x: Tensor) -> Tensor:
        _, weights, _ = self.gate(x)
        left, right = self.left(x), self.right(x)
        cosines = functional.cosine_similarity(left, right, -1) - functional.cosine_similarity(left, right + 0.3, -1)
        return self.norm(weights * self.sharp * cosines[:, None])


def run(watch: Callable[[Model], Any], short: bool, change: Callable[[Model], None] = lambda model: None) -> Any:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(TOKENS, WIDTH)
    change(model)
    with watch(model) as watching:
        with torch.autocast("cpu", torch.bfloat16, enabled=short):
            made = model(x)
        made.float().square().mean().backward()
    return watching


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "reference"
    run(lambda model: tt.capture(model, path, keep="tensors", kinds=KINDS), short=False)
    return path


def checked(reference: Path, change: Callable[[Model], None] = lambda model: None, short: bool = True) -> Comparison:
    result: Comparison = run(lambda model: tt.check(model, reference), short, change).result
    return result


def test_right_code_in_a_short_dtype_raises_no_alarm(reference: Path) -> None:
    found = checked(reference)
    assert found.births == [], found.sentence
    assert any("tokens chose" in note and "(gate · output 2" in note for note in found.notes)
    rules = {row["rule"] for row in found.table.to_pylist() if row["module"] == "gate" and row["kind"] == "output"}
    assert "few tokens chose another expert, whose score is tied" in rules


def test_a_router_that_takes_the_worst_is_found(reference: Path) -> None:
    for short in (False, True):
        found = checked(reference, lambda model: setattr(model.gate, "best", False), short)
        assert found.first is not None
        assert found.first.module == "gate"


def test_a_mistake_in_the_code_of_a_container_is_found(reference: Path) -> None:
    def twice_as_sharp(model: Model) -> None:
        model.sharp = 2.0

    found = checked(reference, twice_as_sharp)
    assert found.first is not None
    assert found.first.module == ""

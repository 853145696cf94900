"""Experts that code of a container chooses: what they are given shows the choices, which no record holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tensortap as tt
from tensortap.compare.measure.routed import compare_routed, estimate_routed
from tensortap.core.records import Comparison

_WIDTH, _TOKENS, _EXPERTS = 16, 1024, 6


class _Experts(nn.Module):
    """Hands each expert the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(_WIDTH, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_EXPERTS))
        self.chosen, self.shift = 2, 0

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).float().softmax(-1)
        weights, chosen = scores.topk(self.chosen, -1)
        chosen = torch.where(torch.arange(len(x))[:, None] < self.shift, (chosen + 1) % _EXPERTS, chosen)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            made = made.index_add(0, token, (expert(x[token]) * weights[token, place, None]).to(made.dtype))
        return made


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(_WIDTH, _WIDTH), _Experts(), nn.Linear(_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.moe(self.first(x)))


def record(path: Path, keep: str, short: bool = False, **mistake: int) -> Path:
    torch.manual_seed(0)
    model, x = _Model(), torch.randn(_TOKENS, _WIDTH)
    for name, value in mistake.items():
        setattr(model.moe, name, value)
    with tt.capture(model, path, keep=keep), torch.autocast("cpu", torch.bfloat16, enabled=short):
        functional.cross_entropy(model(x).float(), torch.arange(_TOKENS) % 4).backward()
    return path


def compared(tmp_path: Path, keep: str, short: bool, **mistake: int) -> Comparison:
    return tt.compare(record(tmp_path / "a", keep), record(tmp_path / "b", keep, short, **mistake))


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_tokens_that_rounding_routes_are_no_divergence(tmp_path: Path, keep: str) -> None:
    found = compared(tmp_path, keep, short=True)
    assert found.first is None and found.verdict in ("match", "incomparable"), found.sentence
    assert "chose another expert" in found.sentence + " ".join(found.notes)


@pytest.mark.parametrize("keep", ["summary", "tensors"])
@pytest.mark.parametrize("mistake", [{"chosen": 1}, {"shift": 3}])
def test_a_wrong_router_is_named(tmp_path: Path, keep: str, mistake: dict[str, int]) -> None:
    found = compared(tmp_path, keep, short=False, **mistake)
    assert found.first is not None and found.first.module == "moe", found.sentence


def test_a_wrong_router_is_named_beside_ties(tmp_path: Path) -> None:
    found = compared(tmp_path, "tensors", short=True, shift=64)
    assert found.first is not None and found.first.module == "moe", found.sentence
    assert compared(tmp_path / "summary", "summary", short=True, shift=64).verdict != "match"


def test_choices_follow_from_what_experts_are_given() -> None:
    tokens = np.arange(8, dtype=np.float32).reshape(4, 2)
    scores = np.array([[0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [0.0, 0.2, 0.8], [0.1, 0.9, 0.0]], np.float32)
    ours = {0: tokens, 1: scores, 10: tokens[[0, 1]], 11: tokens[[3]], 12: tokens[[2]]}
    theirs = {**ours, 10: tokens[[0]], 11: tokens[[1, 3]]}
    found = compare_routed({0: 10, 1: 11, 2: 12}, 4, 1, [0], (ours.__getitem__, theirs.__getitem__))
    assert found is not None and found.which == (1,) and found.tied
    wrong = {**ours, 11: tokens[[3, 2]], 12: tokens[[]]}
    found = compare_routed({0: 10, 1: 11, 2: 12}, 4, 1, [0], (ours.__getitem__, wrong.__getitem__))
    assert found is not None and found.which == (2,) and found.tied is False
    other = {**ours, 10: tokens[[0, 1]] + 1}
    assert compare_routed({0: 10, 1: 11, 2: 12}, 4, 1, [0], (ours.__getitem__, other.__getitem__)) is None


def test_numbers_of_tokens_show_how_many_changed() -> None:
    found = estimate_routed(({0: 5, 1: 3}, {0: 3, 1: 5}), (8, 4), 0.01)
    assert found is not None and (found.changed, found.tokens, found.tied) == (2, 8, None)
    assert estimate_routed(({0: 5, 1: 3}, {0: 3, 1: 4}), (8, 4), 0.01) is None

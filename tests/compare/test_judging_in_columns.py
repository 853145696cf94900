"""Judging whole steps in columns gives what judging pair by pair gives, to the last bit."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from trained_runs import KINDS, Net

import tensortap as tt
from tensortap.compare.align.side import Scope, Side
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.judging import CallsWithoutGradient, PairJudge
from tensortap.compare.judge.pairs import Pairs
from tensortap.compare.judge.rules import table
from tensortap.compare.judge.rules.evidence import Evidence
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.steps import judging as step_judging
from tensortap.compare.judge.steps.judging import StepJudge
from tensortap.compare.judge.structure import Structure

BASE = 2.0**-19
NONE_LACK = CallsWithoutGradient()


class Residual(nn.Module):
    """A model whose own code uses outputs of its children beside the next child, and whose tensors are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.nets = nn.ModuleList([Net(), Net()])
        self.widen = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.embedding(numbers)
        for net in self.nets:
            x = self.norm(x + torch.relu(self.widen(net(x))))
        return x


def captured(path: Path, kinds: tuple[str, ...], **selection: Any) -> Side:
    torch.manual_seed(0)
    model = Residual()
    optimizer = torch.optim.AdamW(model.parameters())
    with tt.capture(model, path, kinds=kinds, optimizer=optimizer, **selection):
        for step in range(4):
            for _ in range(2 if step == 2 else 1):
                model(torch.arange(6) % 7).square().mean().backward()
            if "step_grad" in kinds:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return Side(tt.open(path), Scope())


SELECTIONS: dict[str, dict[str, Any]] = {
    "all": {"kinds": KINDS},
    "default": {"kinds": ("input", "output", "grad_output", "param_grad")},
    "gradients": {"kinds": ("grad_output", "grad_input", "param_grad")},
    "outputs": {"kinds": ("output", "param_grad")},
    "no gradients at outputs": {"kinds": ("input", "output", "param_grad")},
    "state": {"kinds": ("output", "grad_output", "param_grad", "step_grad", "param")},
    "leaves": {"kinds": ("input", "output", "grad_output", "param_grad"), "classes": ["Linear", "BatchNorm1d"]},
}


@pytest.fixture(scope="module", params=SELECTIONS)
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Side:
    return captured(tmp_path_factory.mktemp("runs") / "run", **SELECTIONS[request.param])


def random_pairs(side: Side, seed: int) -> Pairs:
    """Pairs of a run whose errors are drawn: equal, rounding, noise, mistakes; and few that are broken or unknown."""
    dice = np.random.default_rng(seed)
    count = len(side)
    sizes = (0.0, 0.5 * BASE, 3 * BASE, 40 * BASE, 0.1, 2.0)
    shares = ((0.1, 0.3, 0.4, 0.2, 0.0, 0.0), (0.1, 0.2, 0.3, 0.3, 0.07, 0.03))[seed % 2]
    error = dice.choice(sizes, count, p=shares) * dice.uniform(0.5, 1.0, count)
    _, first, same = np.unique(side.tensor_id, return_index=True, return_inverse=True)
    error = np.where(dice.random(count) < 0.9, error[first][same], error)  # usually alike for one tensor
    l2 = np.where(dice.random(count) < 0.02, 0.0, np.asarray(side.l2) * dice.uniform(0.1, 10.0, count))
    unknown = dice.random(count) < 0.01 * (seed % 3)
    return Pairs(
        error=np.where(unknown, np.nan, error),
        row_gain=np.full(count, 32.0),
        l2=np.where(unknown, np.nan, l2),
        std=np.asarray(side.std),
        distance=np.where(unknown, np.nan, error * l2),
        elements=np.asarray(side.elements),
        equal=error == 0,
        nonfinite=(dice.random(count) < 0.01) & (error > 0) & (seed % 4 == 3),
        reshaped=(dice.random(count) < 0.01) & (error > 0) & (seed % 4 == 3),
        zeros=np.zeros(count, np.int64),
        dimensions=np.array([len(side.shape(row)) for row in range(count)], np.int8),
        base=np.where(dice.random(count) < 0.02, 0.0, np.where(dice.random(count) < 0.1, 2.0**-7, BASE)),
        l1=np.asarray(side.l2),
        candidate_l2=l2,
        mixed=dice.random(count) < 0.1 * (seed % 2),
    )


def chosen_rows(side: Side, seed: int) -> np.ndarray:
    """All rows of a run; for some seeds without those that the other side lacks."""
    kept = np.random.default_rng(seed).random(len(side)) >= (0.04 if seed % 4 == 1 else 0.0)
    return np.flatnonzero(kept)


def at_rows(pairs: Pairs, rows: np.ndarray) -> Pairs:
    columns = {each.name: getattr(pairs, each.name) for each in fields(Pairs)}
    of_rows = {name: value[rows] for name, value in columns.items() if isinstance(value, np.ndarray) and len(value)}
    return replace(pairs, **of_rows)


def moved(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return 0.01 * ((7 * before + after) % 13)


def judged(
    kind: type[PairJudge], structure: Structure, pairs: Pairs, policy: Policy, without: CallsWithoutGradient = NONE_LACK
) -> Judgement:
    return kind(Evidence(pairs, structure, policy, moved), without).run()


def assert_same(found: Judgement, expected: Judgement) -> None:
    for each in fields(Judgement):
        ours, theirs = getattr(found, each.name), getattr(expected, each.name)
        if isinstance(ours, np.ndarray):
            assert ours.tobytes() == theirs.tobytes(), each.name
        else:
            assert repr(ours) == repr(theirs) or ours == theirs, each.name


@pytest.mark.parametrize("seed", range(12))
def test_columns_and_pairs_give_the_same_judgement(side: Side, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed >= 6:  # in parts of steps
        monkeypatch.setattr(step_judging, "_AT_ONCE", 10 * seed)
    rows = chosen_rows(side, seed)
    pairs = at_rows(random_pairs(side, seed), rows)
    noise = np.random.default_rng(seed).uniform(0, 4 * BASE, len(rows)) if seed % 5 == 4 else None
    policy = Policy(noise=noise, mapped=seed % 6 == 5)
    structure = Structure(side, rows)
    spots = [call.spot for call in structure.calls.values()]
    some = frozenset(spots[seed :: len(spots) // 2 + 1]) if seed % 3 == 2 else frozenset()
    without = CallsWithoutGradient(some, frozenset(spots[seed + 1 :: len(spots) // 2 + 1]) if some else some)
    expected = judged(PairJudge, structure, pairs, policy, without)
    found = judged(StepJudge, Structure(side, rows), pairs, policy, without)
    assert_same(found, expected)


@pytest.mark.parametrize(
    "kinds",
    [
        ("input", "output", "grad_output", "grad_input", "param_grad"),
        ("output", "param_grad"),
        ("output", "grad_output", "param_grad", "step_grad", "param"),
    ],
    ids=["flowing", "outputs", "state"],
)
def test_most_pairs_are_judged_in_columns(
    kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = captured(tmp_path / "run", kinds)
    alone: list[int] = []
    one_by_one = PairJudge.judge_pair
    monkeypatch.setattr(PairJudge, "judge_pair", lambda self, row: (alone.append(row), one_by_one(self, row))[1])
    pairs = replace(
        random_pairs(side, 0),
        base=np.full(len(side), BASE),
        l2=np.asarray(side.l2) + 1.0,
        error=np.full(len(side), 2 * BASE),
        equal=np.zeros(len(side), bool),
    )
    judged(StepJudge, Structure(side, np.arange(len(side))), pairs, Policy())
    assert len(alone) < len(side) / 4


def test_a_rule_without_columns_is_applied_pair_by_pair(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = table.Rule("anything", lambda pair: True, lambda pair: 3.0)
    monkeypatch.setattr(table, "RULES", (*table.RULES, allowed))
    pairs, rows = random_pairs(side, 0), np.arange(len(side))
    found = judged(StepJudge, Structure(side, rows), pairs, Policy())
    expected = judged(PairJudge, Structure(side, rows), pairs, Policy())
    assert_same(found, expected)
    assert "anything" in found.rule

"""Sources of records, worked out step by step, and reused for steps that repeat the one before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from trained_runs import KINDS, Net

import tensortap as tt
from tensortap.compare.align.distinct import distinct
from tensortap.compare.align.side import Scope, Side
from tensortap.compare.judge.structure import Structure


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Side:
    """Five steps with all kinds of records; two micro steps in the third, so that not all steps are alike."""
    path: Path = tmp_path_factory.mktemp("runs") / "run"
    torch.manual_seed(0)
    net = nn.Sequential(Net(), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    with tt.capture(net, path, kinds=KINDS, optimizer=optimizer):
        for step in range(5):
            for _ in range(2 if step == 2 else 1):
                net(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return Side(tt.open(path), Scope())


def in_one_piece(side: Side) -> Structure:
    structure = Structure(side, np.arange(len(side)))
    vars(structure)["_begins"] = [0]
    return structure


def test_sources_do_not_depend_on_how_many_steps_are_worked_out_at_once(side: Side) -> None:
    by_step, whole = Structure(side, np.arange(len(side))), in_one_piece(side)
    assert len(by_step._begins) == 5
    found = [by_step.sources(row) for row in range(len(side))]
    assert found == [whole.sources(row) for row in range(len(side))]
    assert len(by_step._patterns) < 5  # some steps repeated the one before
    assert any(source < begin for begin in by_step._begins for source in found[begin])  # state of the step before


def test_tables_of_steps_are_those_of_the_whole(side: Side) -> None:
    by_step, whole = Structure(side, np.arange(len(side))), in_one_piece(side)
    for name in ("gradients_of", "step_gradients_of", "own_gradients", "parameters_of", "state"):
        expected = dict(getattr(whole, name).items())
        assert dict(getattr(by_step, name).items()) == expected
        recorded = {key: rows for key, rows in expected.items() if 5 not in key}  # parameters for a step that never ran
        assert all(getattr(by_step, name).get(key) == rows for key, rows in recorded.items())
    assert {call.spot: call.rows for call in by_step.calls.values()} == {
        call.spot: call.rows for call in whole.calls.values()
    }
    for tensor in by_step.tensor:
        users = [[call.spot for call in structure.consumers.get(tensor, ())] for structure in (by_step, whole)]
        assert users[0] == users[1]


def test_steps_that_share_a_tensor_are_worked_out_together(side: Side) -> None:
    rows = np.arange(len(side))
    structure = Structure(side, rows)
    shared = structure._first_seen.copy()
    shared[-1] = 0
    vars(structure)["_first_seen"] = shared
    assert structure._begins == [0]


def test_distinct_rows_of_columns() -> None:
    left, right = np.array([3, 3, 1, 3, -2]), np.array([0, 0, 5, 1, 1 << 61])
    assert distinct(left, right) == [(-2, 1 << 61), (1, 5), (3, 0), (3, 1)]
    assert distinct(left) == [(-2,), (1,), (3,)]
    assert distinct(left[:0], right[:0]) == []

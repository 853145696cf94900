"""A numeric regression test: today's model against a run that was recorded earlier.

    pytest examples/test_numeric_regression.py

In a project, record the golden run once, commit its folder (summaries are small), and compare with it in every run of
the tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.pytest_plugin import assert_runs_match


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 2))


def step(model: nn.Module) -> None:
    model(torch.linspace(-1, 1, 32).reshape(8, 4)).square().mean().backward()


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """The recorded run; a project would have it in its repository."""
    model = build()
    with tt.capture(model, tmp_path / "golden"):
        step(model)
    return tmp_path / "golden"


def test_numbers_stay(golden: Path, tensortap_capture: Any) -> None:
    model = build()
    with tensortap_capture(model) as tap:
        step(model)
    assert_runs_match(golden, tap.path)


def test_a_change_is_named(golden: Path, tensortap_capture: Any) -> None:
    model = build()
    model[1] = nn.GELU(approximate="tanh")
    with tensortap_capture(model) as tap:
        step(model)
    with pytest.raises(AssertionError, match=r"1 \(GELU\)"):
        assert_runs_match(golden, tap.path)

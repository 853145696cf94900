"""The environment that a run records."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import tensortap
from tensortap.capture.environment import describe_environment


def _captured(path: Path) -> dict[str, object]:
    with tensortap.capture(torch.nn.Linear(2, 2), path) as tap:
        tap.step()
    environment = tensortap.open(path).info["environment"]
    assert isinstance(environment, dict)
    return environment


def test_switches_and_variables_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    found = _captured(tmp_path / "run")
    assert found["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # type: ignore[index]
    assert "NVIDIA_TF32_OVERRIDE" not in found["variables"]  # type: ignore[operator]
    assert found["flags"]["cudnn_deterministic"] is True  # type: ignore[index]


def test_a_switch_that_torch_will_not_tell_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensortap.frameworks.torch import environment as torch_environment

    def refuse() -> str:
        raise RuntimeError("two ways to set it disagree")

    monkeypatch.setitem(torch_environment._FLAGS, "matmul_precision", refuse)
    assert _captured(tmp_path / "run")["flags"]["matmul_precision"] is None  # type: ignore[index]


def test_equal_random_states_have_equal_checksums_and_looking_draws_nothing() -> None:
    found = []
    for seed in (0, 0, 1):
        random.seed(seed)
        np.random.seed(seed)
        found.append(describe_environment({"random_states": {"torch": "x"}})["random_states"])
    assert found[0] == found[1]
    assert found[0]["torch"] == "x"
    for name in ("numpy", "python"):
        assert found[0][name] != found[2][name]
    random.seed(1)
    expected = random.random()
    random.seed(1)
    describe_environment({})
    assert random.random() == expected

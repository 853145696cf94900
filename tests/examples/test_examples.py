"""The scripts in examples/ run as a user would run them, and say what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "module"), [("torch_two_runs.py", "2.norm (LayerNorm)"), ("paddle_two_runs.py", "2 (LeakyReLU)")]
)
def test_the_mistake_is_named(tmp_path: Path, script: str, module: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"The runs part in {module}" in done.stdout


def test_the_regression_test_passes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", EXAMPLES / "test_numeric_regression.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def test_every_example_is_run() -> None:
    named = Path(__file__).read_text()
    assert all(script.name in named for script in EXAMPLES.glob("*.py"))

"""Fixtures that every room's tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that tests find `support`


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Give every test the width of a pipe: a worker process of pytest-xdist sets one of its own."""
    os.environ.pop("COLUMNS", None)


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """Where a test may write its run."""
    return tmp_path / "run"

"""Fixtures that every room's tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that tests find `support`


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """Where a test may write its run."""
    return tmp_path / "run"

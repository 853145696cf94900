"""Fixtures that every room's tests share."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that tests find `support`

from support import work_order


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Give every test the width of a pipe: a worker process of pytest-xdist sets one of its own."""
    os.environ.pop("COLUMNS", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute the tests by files, where `--dist loadfile` is given."""
    return work_order.scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Exempt what the imports made from garbage collection: half a million objects that live to the end anyway.

    Every collection walks them, and so does every tap that looks for compiled wrappers.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """Where a test may write its run."""
    return tmp_path / "run"

"""Fixtures that every room's tests share."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that tests find `support`


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Give every test the width of a pipe: a worker process of pytest-xdist sets one of its own."""
    os.environ.pop("COLUMNS", None)


_ONE_WORKER = ("parallel", "browser")
"""Folders whose files share runs that take long to make: each worker process of pytest-xdist would make them anew."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker process run all files of such a folder, where `--dist loadfile` is given."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrFolder(LoadFileScheduling):  # type: ignore[misc, unused-ignore] - a checker may not find xdist
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            folder = Path(file).parent
            return str(folder) if folder.name in _ONE_WORKER else file

    return ByFileOrFolder(config, log)


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

"""A run killed at any moment keeps what it promised."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors
from endless_writer import contents

from tensortap.errors import RunNotFound, RunUnreadable
from tensortap.store import open_run

SCRIPT = Path(__file__).with_name("endless_writer.py")
RUNS = 4


class Writers:
    """Processes that write runs."""

    def __init__(self) -> None:
        alone = {"OPENBLAS_NUM_THREADS": "1"}  # a fork keeps no threads of NumPy
        self._starter = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | alone,
        )

    def start(self, folder: Path, seed: int) -> int:
        return self._ask("start", folder, seed)

    def kill(self, process: int) -> int:
        """Kill a process and return its exit code."""
        os.kill(process, signal.SIGKILL)
        return self._ask("wait", process)

    def close(self) -> None:
        self._starter.communicate(timeout=60)

    def _ask(self, *request: object) -> int:
        assert self._starter.stdin is not None and self._starter.stdout is not None
        self._starter.stdin.write(" ".join(map(str, request)) + "\n")
        self._starter.stdin.flush()
        return int(self._starter.stdout.readline())


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    found = Writers()
    yield found
    found.close()


def promised(folder: Path) -> int:
    """Return how many records are promised; the last line may be torn, like everything else."""
    path = folder.with_suffix(".promised")
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return int(lines[-1]) if lines else 0


def await_promise(folder: Path) -> None:
    for _ in range(20_000):
        if promised(folder):
            return
        time.sleep(0.005)
    raise AssertionError(f"nothing was promised of {folder}")


def check(folder: Path, least: int) -> int:
    for path in folder.rglob("*.safetensors"):
        with safetensors.safe_open(path, "np") as file:  # refuses incomplete files
            assert len(file.keys()) > 0
    try:
        run = open_run(folder)
    except (RunNotFound, RunUnreadable):
        assert least == 0
        return 0
    assert len(run) >= least and not run.finished
    assert any("not closed" in text or "killed" in text or "missing" in text for text in run.notices)
    for seq, found in enumerate(run):
        assert (found.seq, found.tensor) == (seq, seq // 2)
        assert found.summary.sketch[255] == found.tensor
        assert np.array_equal(run.load(found), contents(found.tensor))
        assert run.arguments(found) == {"tensor": found.tensor}, "a call's arguments are there before its records"
    return len(run)


@pytest.mark.parametrize("group", range(14))
def test_kill_at_a_random_moment(tmp_path: Path, group: int, writers: Writers) -> None:
    dice = random.Random(group)
    records = 0
    for number in range(RUNS):
        folder = tmp_path / str(number)
        process = writers.start(folder, group * RUNS + number)
        if group % 4:  # else it may be killed before it has begun
            await_promise(folder)
        time.sleep(dice.random() * 0.1)
        assert writers.kill(process) == -signal.SIGKILL
        records += check(folder, promised(folder))
    assert records or not group % 4

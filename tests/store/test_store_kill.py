"""A run killed at any moment keeps what it promised."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors
from endless_writer import contents

from tensortap.errors import RunNotFound, RunUnreadable
from tensortap.store import open_run

SCRIPT = Path(__file__).with_name("endless_writer.py")
AT_ONCE = 4


def promised_by(child: subprocess.Popen[str]) -> int:
    assert child.stdout is not None
    lines = child.stdout.read().split("\n")[:-1]  # the last line may be torn, like everything else
    return int(lines[-1]) if lines else 0


def check(folder: Path, promised: int) -> int:
    for path in folder.rglob("*.safetensors"):
        with safetensors.safe_open(path, "np") as file:  # refuses incomplete files
            assert len(file.keys()) > 0
    try:
        run = open_run(folder)
    except (RunNotFound, RunUnreadable):
        assert promised == 0
        return 0
    assert len(run) >= promised and not run.finished
    assert any("not closed" in text or "killed" in text or "missing" in text for text in run.notices)
    for seq, found in enumerate(run):
        assert (found.seq, found.tensor) == (seq, seq // 2)
        assert found.summary.sketch[255] == found.tensor
        assert np.array_equal(run.load(found), contents(found.tensor))
        assert run.arguments(found) == {"tensor": found.tensor}, "a call's arguments are there before its records"
    return len(run)


@pytest.mark.parametrize("group", range(14))
def test_kill_at_a_random_moment(tmp_path, group):
    dice = random.Random(group)
    children = []
    for number in range(AT_ONCE):
        command = [sys.executable, str(SCRIPT), str(tmp_path / str(number)), str(group * AT_ONCE + number)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    records = 0
    for number, child in enumerate(children):
        assert child.stdout is not None
        first = 0
        if group % 4:  # else it may be killed before it has begun
            first = int(child.stdout.readline() or 0)
        time.sleep(dice.random() * 0.1)
        child.kill()
        promised = max(first, promised_by(child))
        child.wait()
        child.stdout.close()
        assert child.returncode == -9
        records += check(tmp_path / str(number), promised)
    assert records or not group % 4

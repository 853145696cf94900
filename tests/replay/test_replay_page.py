"""docs/replay.md, file by file and command by command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tensortap
from tensortap.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    commands = 0
    for kind, text in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if kind == "python":
            (tmp_path / text.split()[1]).write_text(text)
            continue
        for part in text.split("$ ")[1:]:
            command, _, expected = part.partition("\n")
            commands += 1
            said = _run(command, tmp_path)
            for line in expected.splitlines():
                assert _words(line) in _words(said), f"{command}\n{said}"
    assert commands == 9


def _run(command: str, folder: Path) -> str:
    program, *words = command.split()
    if program == "tensortap":  # in this process: a new one imports torch again
        ended = CliRunner().invoke(app, words)
        assert ended.exit_code in (0, 1) and isinstance(ended.exception, SystemExit | None), ended.output
        return ended.stdout
    env = os.environ | {"PYTHONPATH": str(Path(tensortap.__file__).parents[1])}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def _words(text: str) -> str:
    return " ".join(text.split())

"""Scripts that use older interfaces find them in the README: every name there can be imported or run as written."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORTS = re.compile(r"`from (tensortap[\w.]*) import (\w+)`")


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_lists_the_old_names(page: str) -> None:
    text = (ROOT / page).read_text()
    found = {name: importlib.import_module(module) for module, name in IMPORTS.findall(text)}
    assert set(found) == {"register_saving_hook", "HookerAndDumper"}
    assert all(callable(getattr(module, name)) for name, module in found.items())
    assert "hook_result_checker.py --pathA A --pathB B" in text and "tensortap check-hooks A B" in text


def test_the_command_in_the_readme_is_the_checker() -> None:
    (command,) = re.findall(r"`(python -m tensortap[\w.]+ --pathA A --pathB B)`", (ROOT / "README.md").read_text())
    words = [sys.executable, *shlex.split(command)[1:3], "--help"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "--pathA" in said and "--pathB" in said

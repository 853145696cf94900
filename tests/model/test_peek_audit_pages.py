"""The examples in the documentation run, and print what the pages say they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def without_digits(text: str) -> str:
    """The last digits of a float are the machine's, and with them the width of a column."""
    return re.sub(r"\s+", " ", re.sub(r"-?\d+\.\d+(e-?\d+)?", "#", text)).strip()


@pytest.mark.parametrize("page", ["peek.md", "audit.md"])
def test_the_example_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    text = (DOCS / page).read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (said,) = re.findall(r"```text\n(.*?)```", text, re.S)
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert without_digits(done.stdout) == without_digits(said)
    assert all(len(line) <= 80 for line in said.splitlines())

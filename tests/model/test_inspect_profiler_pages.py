"""The examples in the documentation run, and print what the pages say they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def examples(page: str) -> list[tuple[str, str]]:
    text = (DOCS / page).read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.S)
    return list(zip(code, re.findall(r"```text\n(.*?)```", text, re.S), strict=True))


def without_times(text: str) -> str:
    """Times and memory are the machine's, and with them the widths of columns."""
    return re.sub(r"\s+", " ", re.sub(r"[\d.]+ (µs|ms|s|B|kB)\b", "#", text)).strip()


@pytest.mark.parametrize(("code", "said"), [*examples("inspect.md"), *examples("profiler.md")])
def test_the_example_prints_what_the_page_says(code: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert without_times(done.stdout) == without_times(said)
    assert all(len(line) <= 80 for line in said.splitlines())

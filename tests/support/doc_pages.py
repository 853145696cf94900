"""Pages of the documentation whose examples print what the page says they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["DOCS", "blocks", "examples", "printed_as_said"]

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page in order, each with its language."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M)


def examples(page: str) -> list[tuple[str, str]]:
    """Each example on a page, and what it is said to print."""
    text = (DOCS / page).read_text()
    code, said = (re.findall(rf"```{kind}\n(.*?)```", text, re.S) for kind in ("python", "text"))
    return list(zip(code, said, strict=True))


def printed_as_said(code: str, said: str, folder: Path, machines_own: str) -> None:
    """Run the example. Text that matches `machines_own` may differ, and with it the widths of columns."""
    (folder / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "example.py"],
        cwd=folder,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert _plain(done.stdout, machines_own) == _plain(said, machines_own)
    assert all(len(line) <= 80 for line in said.splitlines())


def _plain(text: str, machines_own: str) -> str:
    return re.sub(r"\s+", " ", re.sub(machines_own, "#", text)).strip()

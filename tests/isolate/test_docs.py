"""The example of docs/isolation.md prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "isolation.md"


def _without_numbers(text: str) -> str:
    """Their last digits are the machine's."""
    return re.sub(r"\d\.\d+", "#", text)


def test_the_example_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    printed = io.StringIO()
    for language, text in blocks:
        if language == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile(text, str(PAGE), "exec"), names)
        else:
            assert _without_numbers(printed.getvalue()) == _without_numbers(text)
            printed = io.StringIO()
    assert sum(language == "text" for language, _ in blocks) == 3

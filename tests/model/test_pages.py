"""The examples in the documentation run, and print the output that the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.doc_pages import examples, printed_as_said

DIGITS = r"-?\d+\.\d+(e-?\d+)?"
TIMES = r"[\d.]+ (µs|ms|s|B|kB)\b|<?[\d.]+%"
PAGES = {"in-memory.md": DIGITS, "peek.md": DIGITS, "audit.md": DIGITS, "inspect.md": TIMES, "profiler.md": TIMES}


@pytest.mark.parametrize(
    ("code", "said", "machines_own"),
    [(code, said, machines_own) for page, machines_own in PAGES.items() for code, said in examples(page)],
)
def test_the_example_prints_what_the_page_shows(code: str, said: str, machines_own: str, tmp_path: Path) -> None:
    printed_as_said(code, said, tmp_path, machines_own)

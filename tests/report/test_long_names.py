"""Names of any form and depth: every output is written, in time that grows with the length of the names."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest

from support.comparisons import comparison, row, wrong
from tensortap.core.records import Comparison, Key, Unmatched
from tensortap.report import notebook
from tensortap.report.files import (
    comparison_csv,
    comparison_json,
    comparison_junit,
    comparison_markdown,
    comparison_parquet,
)
from tensortap.report.html import comparison as comparison_html
from tensortap.report.terminal import comparison as comparison_page

FILES: tuple[Any, ...] = (
    comparison_csv,
    comparison_html,
    comparison_json,
    comparison_junit,
    comparison_markdown,
    comparison_parquet,
)
LIMIT = 15.0
"""Seconds of CPU. The outputs below take less than one; anything quadratic in the depth takes minutes."""


def write_everything(result: Comparison) -> float:
    """Return the CPU seconds that all outputs take together."""
    started = time.process_time()
    for output in FILES:
        output.write(result, io.BytesIO())
    for verbose in (0, 1, 2):
        lines = comparison_page.render(comparison_page.build(result, verbose), 80)
        assert max(line.cell_len for line in lines) <= 80
    assert result.reference in notebook.comparison_html(result)
    return time.process_time() - started


def compared(names: list[str]) -> Comparison:
    alone = [Unmatched("candidate", Key(3, 0, "forward", f"{name}.q", 0, "output", "0"), 0, "X") for name in names]
    return comparison([row(name) for name in names] + [wrong("z", birth=True)], unmatched=alone)


@pytest.mark.parametrize("name", [".", ".a", "..a", "a.", "a..b", "a" * 100_000, "." * 10_000, ".".join("a" * 10_000)])
def test_odd_and_deep_names(name: str) -> None:
    assert write_everything(compared([name, f"{name}.b", f"{name}.c"])) < LIMIT


def test_a_chain_of_modules_each_inside_the_one_before() -> None:
    assert write_everything(compared([".".join("a" * depth) for depth in range(1, 800)])) < LIMIT

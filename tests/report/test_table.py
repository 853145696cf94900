"""Columns that fit."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from tensortap.report.terminal.table import TableColumn, fit, lines

COLUMNS = [
    TableColumn("name", ["a.very.long.module.name.indeed", "b"], left=True, least=10),
    TableColumn("first", ["1.234", "22.50"], optional=1),
    TableColumn("third", ["3.000", "3.000"], optional=3),
    TableColumn("second", ["2.000", "2.000"], optional=2),
]


def titles(width: int | None) -> list[str]:
    return [column.title for column, _ in fit(COLUMNS, width)]


def test_without_a_width_all_is_there_and_nothing_is_cut() -> None:
    assert titles(None) == ["name", "first", "third", "second"]
    assert lines(COLUMNS, None)[1].plain.startswith("a.very.long.module.name.indeed")


def test_the_least_important_column_goes_first() -> None:
    assert titles(32) == ["name", "first", "third", "second"]
    assert titles(31) == ["name", "first", "second"]
    assert titles(24) == ["name", "first"]
    assert titles(12) == ["name"]


@pytest.mark.parametrize("width", range(6, 60))
@pytest.mark.parametrize("indent", [0, 3])
def test_no_line_is_too_long(width: int, indent: int) -> None:
    assert max(cell_len(line.plain) for line in lines(COLUMNS, width + indent, indent)) <= width + indent


def test_numbers_stand_right_and_names_left() -> None:
    header, first, second = (line.plain for line in lines(COLUMNS[:2], 60))
    assert header == "name                            first"
    assert first == "a.very.long.module.name.indeed  1.234"
    assert second == "b                               22.50"

"""Join the data of a page, its details and its static parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from tensortap.core.details import Detail
from tensortap.report.html.data.blocks import json_block
from tensortap.report.html.data.columns import PageColumn, entries, packed
from tensortap.report.html.data.details import fitting
from tensortap.report.html.data.head import Head
from tensortap.report.html.page import Page

__all__ = ["DETAILS", "assembled"]

DETAILS = 48
"""Number of details in a page; `tensortap view` has all of them."""


class _Data(Protocol):
    """The data that scripts draw."""

    def columns(self) -> tuple[list[PageColumn], dict[str, list[str]]]: ...

    def head(self) -> Head: ...


def assembled(
    kind: str,
    title: str,
    data: _Data,
    documents: Iterable[tuple[Detail, dict[str, Any]]],
    *,
    before: str,
    after: str,
) -> Page:
    """Return the page with its data as separate blocks, which a served page requests one by one."""
    columns, words = data.columns()
    details = fitting(documents)
    blocks = {row: block.id for detail, block in details for row in detail.rows}
    head = json_block("head", data.head().object(kind, entries(columns), words, blocks))
    return Page(kind, title, before, after, head, [*packed(columns), *(block for _, block in details)])

"""Answers to the requests of an open page, from open runs. docs/report-data.md describes the requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tensortap.compare.details.pairs import PairDetails
from tensortap.compare.details.records import RecordDetails
from tensortap.core.details import Detail, TileMap, Window
from tensortap.core.records import Comparison, HealthReport
from tensortap.report.facts import RunFacts
from tensortap.report.files.output import encoded
from tensortap.report.html import comparison as comparison_html
from tensortap.report.html import run as run_html
from tensortap.report.html.data.blocks import numbers
from tensortap.report.html.data.details import map_object
from tensortap.report.html.page import Page

__all__ = ["Answer", "Answers", "Refused", "about_one", "about_two"]

_MOST_VALUES = 64  # in each direction of a slice


@dataclass(frozen=True)
class Answer:
    """Bytes and their media type."""

    body: bytes
    type: str


class Refused(Exception):
    """A request without an answer, and its HTTP status."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Details(Protocol):
    """Computes details of pairs or of records."""

    def detail(self, row: int, /) -> Detail: ...

    def values(
        self, row: int, window: Window, side: str | None, /
    ) -> tuple[tuple[int, int], Window, list[npt.NDArray[np.float64]]]: ...

    def why_not(self, row: int, side: str | None = None, /) -> str: ...


class Answers:
    """Answers the requests of one page. One thread at a time reads the runs; stored blocks need no wait."""

    def __init__(
        self,
        page: Page,
        rows: int,
        details: _Details,
        document: Callable[[Detail], dict[str, Any]],
        tiles: Callable[[int, Window], TileMap] | None,
    ) -> None:
        self._page = b"".join(encoded(page.parts(served=True)))
        self._blocks = {block.id: block.data for block in page.blocks if block.id.startswith("column-")}
        self._rows = rows
        self._details = details
        self._document = document
        self._tiles = tiles
        self._one_at_a_time = threading.Lock()

    def answer(self, path: str, asked: Mapping[str, str]) -> Answer:
        """Return the answer. Raise Refused if there is none."""
        if path == "":
            return Answer(self._page, "text/html; charset=utf-8")
        if path.startswith("block/"):
            block = self._blocks.get(path.removeprefix("block/"))
            if block is None:
                raise Refused(HTTPStatus.NOT_FOUND, "there is no such block")
            return Answer(block, "application/octet-stream")
        known = {"detail": self._detail, "map": self._map, "slice": self._slice}
        if path not in known:
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing under this name")
        row = self._row(asked)
        with self._one_at_a_time:
            found = known[path](row, asked)
        return Answer(json.dumps(numbers(found), allow_nan=False).encode(), "application/json")

    def _detail(self, row: int, asked: Mapping[str, str]) -> Any:
        return self._document(self._details.detail(row))

    def _map(self, row: int, asked: Mapping[str, str]) -> Any:
        if self._tiles is None:
            raise Refused(HTTPStatus.NOT_FOUND, "a single run has no differences")
        self._check_kept(row)
        return map_object(self._tiles(row, _window(asked)))

    def _slice(self, row: int, asked: Mapping[str, str]) -> Any:
        side = asked.get("side")
        if side not in (None, "reference", "candidate"):
            raise Refused(HTTPStatus.BAD_REQUEST, "give the side: side=reference or side=candidate")
        self._check_kept(row, side)
        wanted = _window(asked)
        wanted = wanted._replace(
            bottom=min(wanted.bottom, wanted.top + _MOST_VALUES), right=min(wanted.right, wanted.left + _MOST_VALUES)
        )
        whole, window, sides = self._details.values(row, wanted, side)
        values = [each.reshape(-1).tolist() for each in sides]
        return {
            "window": list(window),
            "whole": list(whole),
            "reference": values[0],
            "candidate": values[1] if len(values) > 1 else None,
        }

    def _row(self, asked: Mapping[str, str]) -> int:
        text = asked.get("row", "")
        if not (text.isascii() and text.isdecimal()):
            raise Refused(HTTPStatus.BAD_REQUEST, "give the row: row=17")
        if len(text) > 12 or int(text) >= self._rows:
            raise Refused(HTTPStatus.NOT_FOUND, f"there are {self._rows} rows, counted from 0")
        return int(text)

    def _check_kept(self, row: int, side: str | None = None) -> None:
        if why := self._details.why_not(row, side):
            raise Refused(HTTPStatus.CONFLICT, why)


def about_two(comparison: Comparison, inspector: PairDetails) -> Answers:
    page = comparison_html.page(comparison)

    def document(detail: Detail) -> dict[str, Any]:
        return comparison_html.detail_document(comparison, detail)

    return Answers(page, len(comparison), inspector, document, inspector.map)


def about_one(facts: RunFacts, examination: HealthReport, inspector: RecordDetails) -> Answers:
    page = run_html.page(facts, examination)

    def document(detail: Detail) -> dict[str, Any]:
        return run_html.detail_document(examination, detail)

    return Answers(page, len(examination), inspector, document, None)


def _window(asked: Mapping[str, str]) -> Window:
    parts = asked.get("window", "").split(",")
    if len(parts) != 4 or not all(part.isascii() and part.isdecimal() and len(part) <= 15 for part in parts):
        raise Refused(HTTPStatus.BAD_REQUEST, "give the part: window=top,bottom,left,right")
    return Window(*map(int, parts))

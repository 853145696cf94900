"""A comparison as one page for a browser, which opens from disk: html/ holds its parts."""

from __future__ import annotations

from typing import Any, BinaryIO

from tensortap.details import Detail
from tensortap.records import Comparison, Key
from tensortap.report import pairs
from tensortap.report.facts import ran_on
from tensortap.report.html import static
from tensortap.report.html.blocks import json_block
from tensortap.report.html.columns import entries, packed
from tensortap.report.html.definitions import PAIRS
from tensortap.report.html.detail_data import detail_object, fitting
from tensortap.report.html.markup import join
from tensortap.report.html.page import Page
from tensortap.report.html.pairs_data import PairsData
from tensortap.report.output import encoded
from tensortap.report.wording import clean, plural

__all__ = ["DETAILS", "detail_document", "page", "write"]

DETAILS = 48
"""How many tensors a page shows closely: more than that is for `tensortap view`."""
_VERDICTS = {"match": "=", "diverged": "✖", "incomparable": "?"}


def write(comparison: Comparison, file: BinaryIO) -> None:
    file.writelines(encoded(page(comparison).parts()))


def page(comparison: Comparison) -> Page:
    """The page, its data still in pieces: scripts of a page that is served ask for them one by one."""
    data = PairsData(comparison)
    columns, words = data.columns()
    details = fitting((detail, detail_document(comparison, detail)) for detail in comparison.details)
    blocks = {row: block.id for detail, block in details for row in detail.rows}
    return Page(
        kind="comparison",
        title=f"{comparison.verdict}: {clean(comparison.candidate)} against {clean(comparison.reference)}",
        before=join([_header(comparison), _banner(data), static.notes(comparison.notes)]),
        after=join(
            [
                static.births(
                    "Where wrong values were born", [*data.births, *data.missing], "No wrong value was born."
                ),
                static.environment(data.settings),
                static.definitions(PAIRS),
            ]
        ),
        head=json_block("head", data.head(words, entries(columns), blocks)),
        blocks=[*packed(columns), *(block for _, block in details)],
    )


def detail_document(comparison: Comparison, detail: Detail) -> dict[str, Any]:
    """One close look, for the page's scripts."""
    row = pairs.row_at(comparison, detail.row)
    title = Key(*(row[name] for name in Key._fields))
    return detail_object(detail, row, f"{title} · rank {row['rank']}")


def _header(comparison: Comparison) -> str:
    runs = [
        (side, path, ran_on(comparison.info.get(side, {})))
        for side, path in (("reference", comparison.reference), ("candidate", comparison.candidate))
    ]
    counts = [plural(len(comparison), "pair")]
    counts += [static.glyph(status, *words.split(" ", 1)) for status, words in pairs.tally(comparison.counts)]
    return static.header("tensortap: two runs compared", runs, counts, f"Allowed: {comparison.policy}")


def _banner(data: PairsData) -> str:
    comparison = data.comparison
    first: Any = data.births[0] if comparison.first is not None and data.births else None
    nonfinite = next((birth for birth in data.births if birth["status"] == "nonfinite"), None)
    return static.banner(
        comparison.verdict,
        _VERDICTS.get(comparison.verdict, "?"),
        comparison.sentence,
        first,
        nonfinite if nonfinite is not first else None,
    )

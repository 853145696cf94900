"""The page about a comparison."""

from __future__ import annotations

from typing import Any, BinaryIO

from tensortap.core.details import Detail
from tensortap.core.records import Comparison, Key
from tensortap.report import pairs
from tensortap.report.facts import ran_on
from tensortap.report.files.output import encoded
from tensortap.report.html import static
from tensortap.report.html.assembly import DETAILS, assembled
from tensortap.report.html.data.details import detail_object
from tensortap.report.html.data.pairs import PairsData
from tensortap.report.html.definitions import PAIRS
from tensortap.report.html.markup import join
from tensortap.report.html.page import Page
from tensortap.report.wording import clean, plural

__all__ = ["DETAILS", "detail_document", "page", "write"]

_VERDICTS = {"match": "=", "imprecise": "≈", "diverged": "✖", "incomparable": "?"}


def write(comparison: Comparison, file: BinaryIO) -> None:
    file.writelines(encoded(page(comparison).parts()))


def page(comparison: Comparison) -> Page:
    """Build the page; see `assembled`."""
    data = PairsData(comparison)
    return assembled(
        "comparison",
        f"{comparison.verdict}: {clean(comparison.candidate)} against {clean(comparison.reference)}",
        data,
        ((detail, detail_document(comparison, detail)) for detail in comparison.details),
        before=join([_header(comparison), _banner(data), static.notes(comparison.notes)]),
        after=join(
            [
                static.births(
                    "Where wrong values were born", [*data.births, *data.missing], "No wrong value was found."
                ),
                static.environment(data.settings),
                static.definitions(PAIRS),
            ]
        ),
    )


def detail_document(comparison: Comparison, detail: Detail) -> dict[str, Any]:
    """Return a detail as the page's scripts read it."""
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

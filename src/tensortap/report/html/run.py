"""The page about a single run: its statistics over execution order and steps, and its findings."""

from __future__ import annotations

from typing import Any, BinaryIO

from tensortap.core.details import Detail
from tensortap.core.records import HEALTH_STATUSES, HealthReport, Key
from tensortap.report.facts import RunFacts, ran_on
from tensortap.report.files.output import encoded
from tensortap.report.html import static
from tensortap.report.html.assembly import DETAILS, assembled
from tensortap.report.html.data.details import detail_object
from tensortap.report.html.data.run import RunData
from tensortap.report.html.definitions import RUN
from tensortap.report.html.markup import join
from tensortap.report.html.page import Page
from tensortap.report.wording import clean, count, plural

__all__ = ["DETAILS", "detail_document", "page", "write"]

_SIGNS = {"healthy": "=", "suspicious": "✖", "empty": "?"}
_GLYPHS = dict(zip(HEALTH_STATUSES, "·✖▲○▽", strict=True))


def write(facts: RunFacts, examination: HealthReport, file: BinaryIO) -> None:
    file.writelines(encoded(page(facts, examination).parts()))


def page(facts: RunFacts, examination: HealthReport) -> Page:
    """Build the page; see `assembled`."""
    data = RunData(facts, examination)
    return assembled(
        "run",
        f"{examination.verdict}: {clean(examination.path)}",
        data,
        ((detail, detail_document(examination, detail)) for detail in examination.details),
        before=join([_header(facts, examination), _banner(data), static.notes(data.notes)]),
        after=join(
            [
                static.births("Findings", data.births, "None."),
                static.coverage(data.unseen),
                static.calls(facts.calls),
                static.environment(data.settings),
                static.definitions(RUN),
            ]
        ),
    )


def detail_document(examination: HealthReport, detail: Detail) -> dict[str, Any]:
    """Return a detail as the page's scripts read it."""
    row = examination.table.slice(detail.row, 1).to_pylist()[0]
    title = Key(*(row[name] for name in Key._fields))
    return detail_object(detail, row, f"{title} · rank {row['rank']}")


def _header(facts: RunFacts, examination: HealthReport) -> str:
    counts = [plural(len(examination), "record"), plural(len(facts.steps), "step"), plural(len(facts.ranks), "rank")]
    counts += [
        static.glyph(status, _GLYPHS[status], f"{count(examination.counts[status])} {status}")
        for status in HEALTH_STATUSES
        if examination.counts.get(status)
    ]
    state = "" if facts.finished else "not finished; "
    runs = [("run", examination.path, f"{state}{ran_on(facts.info)}")]
    return static.header("tensortap: one run", runs, counts, examination.policy)


def _banner(data: RunData) -> str:
    examination = data.examination
    first = None if data.first is None else data.births[data.first]
    sign = _SIGNS[examination.verdict]
    return static.banner(examination.verdict, sign, examination.sentence, first, None)

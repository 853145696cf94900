"""The health of a single run as a page in the terminal: the answer, a line for each finding, and what was examined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from tensortap.core.records import HEALTH_STATUSES, HealthFinding, HealthReport, display_name
from tensortap.report.terminal import table
from tensortap.report.terminal.table import TableColumn
from tensortap.report.wording import clean, count, plural, wrap

__all__ = ["HealthPage", "build", "render"]

_MOST = 15
_LABEL = 9
_VERDICTS = {"healthy": ("✔", "bold green"), "suspicious": ("✖", "bold red"), "empty": ("∅", "bold yellow")}
_STYLES = {"nonfinite": "red", "exploding": "red", "dead": "yellow", "vanishing": "yellow"}


@dataclass(frozen=True)
class HealthPage:
    """The contents of the page, before layout."""

    verdict: str
    sentence: str
    findings: Sequence[HealthFinding]
    hidden: int
    """Number of findings that are not among these."""
    counts: Mapping[str, int]
    records: int
    ranks: bool
    """Whether there are several ranks."""
    notes: Sequence[str]
    policy: str
    path: str


def build(report: HealthReport, verbose: bool = False) -> HealthPage:
    """Choose what to show; `verbose` shows all findings."""
    shown = report.births if verbose else report.births[:_MOST]
    return HealthPage(
        verdict=report.verdict,
        sentence=clean(report.sentence),
        findings=shown,
        hidden=len(report.births) - len(shown),
        counts={status: report.counts[status] for status in HEALTH_STATUSES if report.counts.get(status)},
        records=len(report),
        ranks=len({birth.rank for birth in report.births}) > 1,
        notes=[clean(note) for note in report.notes],
        policy=clean(report.policy),
        path=clean(report.path),
    )


def render(page: HealthPage, width: int | None) -> list[Text]:
    """Return the page as lines of at most `width` cells; without a width, nothing is cut or wrapped."""
    sign, style = _VERDICTS.get(page.verdict, ("?", "bold"))
    parts = wrap(page.sentence, None if width is None else width - 2)
    lines = [Text(f"{' ' if at else sign} {part}", style) for at, part in enumerate(parts)]
    lines.append(Text())
    if page.findings:
        lines += [Text("in execution order, where it first shows", "bold")]
        lines += table.lines(_columns(page), width, indent=2)
        if page.hidden:
            lines.append(Text(f"  {plural(page.hidden, 'more finding')}: -v shows all", "dim"))
        lines.append(Text())
    tally = "   ".join(f"{count(number)} {status}" for status, number in page.counts.items())
    lines += _entry("records", f"{count(page.records)}: {tally}" if tally else "none", width)
    for at, note in enumerate(page.notes):
        lines += _entry("" if at else "note", note, width)
    lines += _entry("policy", page.policy, width, "dim")
    return lines + _entry("run", page.path, width, "dim")


def _columns(page: HealthPage) -> list[TableColumn]:
    findings = page.findings
    ranks = [TableColumn("rank", [str(each.rank) for each in findings])] if page.ranks else []
    return [
        TableColumn("step", [str(each.key.step) for each in findings]),
        *ranks,
        TableColumn("module", [clean(display_name(each.key.module)) for each in findings], left=True, least=12),
        TableColumn("tensor", [clean(f"{each.key.kind} {each.key.path}") for each in findings], left=True, least=8),
        TableColumn(
            "status",
            [each.status for each in findings],
            left=True,
            styles=[_STYLES.get(each.status, "") for each in findings],
        ),
        TableColumn("it", [clean(each.text) for each in findings], left=True, least=20),
    ]


def _entry(label: str, text: str, width: int | None, style: str = "") -> list[Text]:
    """Return a label with a text that is wrapped in its own column."""
    head = "  " + label.ljust(_LABEL) + "  "
    parts = wrap(text, None if width is None else width - len(head))
    return [
        Text(head if not at else " " * len(head), "dim") + Text(part, style) for at, part in enumerate(parts or [""])
    ]

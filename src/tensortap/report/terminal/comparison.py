"""A comparison on the terminal: the sentence, the rows around the first divergence, other births and notes.

It fits one screen of 80 columns and 24 lines. Rows, births, unmatched names and notes that do not fit are counted.
`verbose=1` shows a hundred rows and everything else, `verbose=2` all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
from rich.text import Text

from tensortap.core.causes import CONTAINER_CAUSES
from tensortap.core.records import Comparison, Finding, display_name
from tensortap.report import pairs, unmatched
from tensortap.report.terminal import table
from tensortap.report.terminal.pairs_table import STYLES, columns_of
from tensortap.report.unmatched import UnmatchedGroup
from tensortap.report.wording import clean, count, plural, rough, wrap

__all__ = ["ComparisonPage", "build", "headline", "render"]

_LABEL = 9
_SCREEN = 23  # lines; the prompt takes one
_MANY = 100
_EVERYTHING = 1 << 60
_VERDICTS = {
    "match": ("✔", "bold green"),
    "imprecise": ("≈", "bold yellow"),
    "diverged": ("✖", "bold red"),
    "incomparable": ("∅", "bold yellow"),
}


@dataclass(frozen=True)
class ComparisonPage:
    """The contents of the page, before layout."""

    verdict: str
    sentence: str
    about: str
    """A title for the rows."""
    rows: Sequence[Mapping[str, Any]]
    centre: int
    """Position of the first divergence among the rows, or 0."""
    detail: str
    """Further facts about the first divergence."""
    ranks: int
    pairs: int
    tally: Sequence[tuple[str, str]]
    births: Sequence[Finding]
    """All but the first."""
    groups: Sequence[UnmatchedGroup]
    unlisted: str
    """A line about unmatched records that are in no group."""
    notes: Sequence[str]
    policy: str
    sides: tuple[str, str]
    bad: int
    """Total number of rows that failed."""
    mapped: Sequence[str]
    """Names and layouts that differ on the candidate, one per line."""
    verbose: int = 0


@dataclass(frozen=True)
class _Room:
    """The number of lines of each part."""

    rows: int
    births: int
    groups: int
    notes: int


# Tried in order until the page fits the screen.
_ROOMS = (
    _Room(9, 5, 8, 5),
    _Room(9, 5, 4, 3),
    _Room(8, 3, 3, 2),
    _Room(7, 3, 2, 2),
    _Room(6, 2, 2, 2),
    _Room(5, 2, 2, 1),
    _Room(4, 1, 1, 1),
    _Room(3, 1, 1, 1),
    _Room(1, 0, 0, 1),
)
_ALL = _Room(_EVERYTHING, _EVERYTHING, _EVERYTHING, _EVERYTHING)


def build(comparison: Comparison, verbose: int = 0) -> ComparisonPage:
    """Build the page about a comparison; `verbose` is 0, 1 or 2."""
    about, places, centre = _chosen(comparison, verbose)
    rows = pairs.rows_of(comparison, places) if places else []
    return ComparisonPage(
        verdict=comparison.verdict,
        sentence=clean(comparison.sentence),
        about=about,
        rows=rows,
        centre=centre,
        detail=pairs.detail(rows[centre]) if rows and comparison.verdict == "diverged" else "",
        ranks=len(pc.unique(comparison.table.column("rank"))),
        pairs=len(comparison),
        tally=pairs.tally(comparison.counts),
        births=[birth for birth in comparison.births if birth != comparison.first],
        groups=unmatched.groups(comparison),
        unlisted=unmatched.unlisted(comparison),
        notes=[clean(note) for note in comparison.notes],
        policy=clean(comparison.policy),
        sides=(clean(comparison.reference), clean(comparison.candidate)),
        bad=sum(comparison.counts.get(status, 0) for status in pairs.WRONG_STATUSES),
        mapped=_mapped(comparison) if verbose else (),
        verbose=int(verbose),
    )


def render(page: ComparisonPage, width: int | None) -> list[Text]:
    """Return the page as lines of at most `width` cells; without a width, nothing is cut or wrapped."""
    if page.verbose:
        return _lines(page, width, _ALL)
    fitting = (lines for room in _ROOMS if len(lines := _lines(page, width, room)) <= _SCREEN)
    return next(fitting, None) or _lines(page, width, _ROOMS[-1])


def headline(verdict: str, sentence: str, width: int | None) -> list[Text]:
    """Return the sign and the sentence of the verdict as lines."""
    sign, style = _VERDICTS.get(verdict, ("?", "bold"))
    parts = wrap(clean(sentence), None if width is None else width - 2)
    return [Text(f"{' ' if at else sign} {part}", style) for at, part in enumerate(parts)]


# --- the data ------------------------------------------------------------------------------------------------------
def _chosen(comparison: Comparison, verbose: int) -> tuple[str, Sequence[int], int]:
    """Return a title, the rows to show, and the position of the central one."""
    at = pairs.place(comparison, comparison.first)
    if at is None and comparison.verdict == "diverged":
        at = next(iter(pairs.bad_rows(comparison, 1)), None)
    if verbose > 1:
        return "in execution order, all pairs", range(len(comparison)), at or 0
    if at is not None:
        before, after = (_MANY // 4, _MANY - _MANY // 4 - 1) if verbose else (_ROOMS[0].rows, _ROOMS[0].rows)
        places = pairs.around(comparison, at, before, after)
        what = "the first divergence" if comparison.verdict == "diverged" else "the first less exact one"
        return f"in execution order, around {what}", places, places.index(at)
    if comparison.verdict == "match" or verbose:
        return "closest to their tolerance", pairs.nearest(comparison, _MANY if verbose else 5), 0
    return "", [], 0


def _mapped(comparison: Comparison) -> list[str]:
    """Return names and layouts that differ, the candidate's first."""
    if comparison.mapping is None:
        return []
    placed = [*comparison.mapping.modules, *comparison.mapping.tensors, *comparison.mapping.values]
    return [
        clean(
            f"{display_name(each.candidate)} → {display_name(each.reference)} "
            f"({', '.join(filter(None, (each.change, each.how)))})"
        )
        for each in placed
        if each.change or (each.candidate != each.reference and each.how != "same name")
    ]


# --- the lines -----------------------------------------------------------------------------------------------------
def _lines(page: ComparisonPage, width: int | None, room: _Room) -> list[Text]:
    lines = headline(page.verdict, page.sentence, width)
    lines += [Text(), *_table(page, width, room.rows)]
    if page.detail:
        lines += _entry("there", page.detail, width)
    lines += _entry("pairs", _tally(page), width)
    hidden = " (-v shows them)"
    for at, birth in enumerate(page.births[: room.births]):
        lines += _entry("" if at else "also born", _birth(birth, page), width)
    if rest := len(page.births[room.births :]):
        more = f"and {count(rest)} more born elsewhere" if room.births else f"{plural(rest, 'place')} more"
        lines += _entry("" if room.births else "also born", more + hidden, width, "dim")
    lines += _unmatched(page, width, room.groups)
    for at, note in enumerate(page.notes[: room.notes]):
        lines += _entry("" if at else "note", note, width)
    if rest := len(page.notes[room.notes :]):
        lines += _entry("" if room.notes else "note", f"{plural(rest, 'more note')}{hidden}", width, "dim")
    for at, mapped in enumerate(page.mapped[: _MANY if page.verbose == 1 else None]):
        lines += _entry("" if at else "mapped", mapped, width)
    if page.verbose == 1 and len(page.mapped) > _MANY:
        lines += _entry("", f"{count(len(page.mapped) - _MANY)} more: -vv shows all", width, "dim")
    lines += _entry("allowed", page.policy, width, "dim")
    return lines + _entry("runs", "reference {}, candidate {}".format(*page.sides), width, "dim")


def _table(page: ComparisonPage, width: int | None, most: int) -> list[Text]:
    if not page.rows:
        return []
    before = min(page.centre, max(most // 2, most - (len(page.rows) - page.centre)))
    rows = page.rows[page.centre - before : page.centre - before + most] if most < len(page.rows) else page.rows
    steps, ranks = ({row[name] for row in rows} for name in ("step", "rank"))
    shared = [f"step {steps.pop()}"] if len(steps) == 1 else []
    if page.ranks > 1 and len(ranks) == 1:
        shared.append(f"rank {ranks.pop()}")
    about = f"{page.about} ({', '.join(shared)})" if shared else page.about
    lines = [Text(part, "bold") for part in wrap(about, width)]
    lines += table.lines(columns_of(rows, page.ranks), width, indent=2)
    if rest := _remainder(page, rows):
        lines += [Text(f"  {part}", "dim") for part in wrap(rest, None if width is None else width - 2)]
    return [*lines, Text()]


def _remainder(page: ComparisonPage, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of further rows of interest, and the option that shows them."""
    if page.verbose > 1:
        return ""
    how = "-vv shows all" if page.verbose else "-v shows 100 rows, -vv all"
    if page.verdict == "diverged":
        more = page.bad - sum(row["status"] in pairs.WRONG_STATUSES for row in rows)
        return f"{count(more)} more that failed: {how}" if more > 0 else ""
    return f"{count(page.pairs - len(rows))} more: {how}" if page.pairs > len(rows) else ""


def _tally(page: ComparisonPage) -> Text:
    said = Text(f"{count(page.pairs)}: " if page.tally and page.pairs else "" if page.tally else "none")
    for at, (status, words) in enumerate(page.tally):
        said.append("   " if at else "").append(words, STYLES.get(status, ""))
    return said


def _birth(birth: Finding, page: ComparisonPage) -> str:
    key = birth.key
    place = clean(display_name(birth.module))
    if birth.cause in CONTAINER_CAUSES:
        place += "'s code"
    parts = [place, clean(f"{key.kind} {key.path}"), f"step {key.step}"]
    if key.phase == "eval":
        parts.append("evaluation")
    parts += [f"{name} {n}" for name, n in (("micro", key.micro), ("call", key.call)) if n]
    if page.ranks > 1:
        parts.append(f"rank {birth.rank}")
    if birth.status == "diverged" and birth.difference is not None:
        parts.append(f"off by {'' if birth.difference.exact else '~'}{rough(birth.rel_l2)}")
    else:
        parts.append("NaN or Inf" if birth.status == "nonfinite" else clean(birth.status))
    if birth.truth is not None and birth.status == "imprecise":
        parts.append(f"{birth.truth.ratio:.2g} times as far from the {clean(birth.truth.of)} result")
    if page.verbose and birth.container is not None:
        parts.append(f"seen at {clean(display_name(key.module))}")
    return " · ".join(parts)


def _unmatched(page: ComparisonPage, width: int | None, most: int) -> list[Text]:
    lines: list[Text] = []
    for at, group in enumerate(page.groups[:most]):
        lines += _entry("" if at else "unmatched", unmatched.words(group), width)
    if rest := page.groups[most:]:
        tensors = plural(sum(group.tensors for group in rest), "tensor")
        more = f"and {tensors} more in {plural(len(rest), 'group')}" if most else f"∅ {tensors}"
        lines += _entry("" if most else "unmatched", f"{more} (-v shows them)", width, "dim")
    if page.unlisted:
        lines += _entry("", page.unlisted, width, "dim")
    return lines


def _entry(label: str, text: str | Text, width: int | None, style: str = "") -> list[Text]:
    """Return a label with a text that is wrapped in its own column."""
    head = Text("  " + label.ljust(_LABEL) + "  ", "dim")
    room = None if width is None else width - len(head)
    if isinstance(text, Text):
        if room is None or text.cell_len <= room:
            return [head + text]
        text = text.plain
    parts = wrap(text, room)
    heads = [head, *[Text(" " * len(head))] * (len(parts) - 1)]
    return [each + Text(part, style) for each, part in zip(heads, parts, strict=True)]

"""HTML fragments of results for notebooks: a verdict or a small table.

A fragment has no scripts and no style sheet, so that it changes nothing else on the page. Text keeps the colour of the
notebook's theme; a coloured label brings its own background. Names are escaped and cut, rows are limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tensortap.core.records import Comparison, Coverage, HealthReport, display_name
from tensortap.report import pairs
from tensortap.report.facts import ran_on
from tensortap.report.files.saving import save_comparison
from tensortap.report.html.markup import element, text
from tensortap.report.wording import clean, count, middle, nbytes, numbers_in_short, plural, rough, when

__all__ = ["comparison_html", "coverage_html", "health_html", "run_html", "save_comparison", "tap_html"]

_NAME = 80  # characters of a name
_TEXT = 2000  # characters of a sentence, note or reason
_PAIRS_BEFORE, _PAIRS_AFTER = 2, 5
_FINDINGS = 10
_NOTES = 5
_MODULES = 40

_GOOD, _BAD, _UNSURE = "#1b6e3c;color:#fff", "#a63603;color:#fff", "#f0b429;color:#222"
_LABELS = {
    "match": ("✔ match", _GOOD),
    "imprecise": ("≈ imprecise", _UNSURE),
    "diverged": ("✖ diverged", _BAD),
    "incomparable": ("∅ incomparable", _UNSURE),
    "healthy": ("✔ healthy", _GOOD),
    "suspicious": ("✖ suspicious", _BAD),
    "empty": ("∅ empty", _UNSURE),
    "finished": ("finished", _GOOD),
    "not finished": ("not finished", _UNSURE),
}
_BOX = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;max-width:75em;overflow-x:auto"
_LABEL = "border-radius:4px;padding:1px 7px;font-weight:600;white-space:nowrap;background:"
_LINE = "margin:4px 0"
_DIM = "margin:4px 0;opacity:.75"
_TABLE = "border-collapse:collapse;margin:6px 0"
_CELL = "padding:2px 10px 2px 0;vertical-align:top;border:0;border-bottom:1px solid rgba(128,128,128,.35);text-align:"


class ShownRun(Protocol):
    """The attributes of a run that its fragment reads."""

    path: Any
    info: Any
    ranks: Any

    @property
    def finished(self) -> bool: ...
    @property
    def steps(self) -> Sequence[int]: ...
    @property
    def notices(self) -> Sequence[str]: ...
    @property
    def coverage(self) -> Mapping[int, Sequence[Coverage]]: ...
    def __len__(self) -> int: ...


def comparison_html(comparison: Comparison) -> str:
    """Return the verdict, the sentence, the pairs around the first divergence, and the notes."""
    tally = " · ".join(words for _, words in pairs.tally(comparison.counts))
    sides = f"reference {_name(comparison.reference)}, candidate {_name(comparison.candidate)}"
    return _box(
        _line(_label(comparison.verdict), " ", _shown(comparison.sentence)),
        _pairs_table(comparison),
        _dim(text(f"{plural(len(comparison), 'pair')}: {tally or 'none'}")),
        _notes(comparison.notes),
        _dim(text(sides)),
    )


def health_html(report: HealthReport) -> str:
    """Return the verdict, the sentence, and the first findings."""
    rows = [
        [_name(display_name(each.key.module)), _name(f"{each.key.kind} {each.key.path}"), str(each.key.step), each.text]
        for each in report.births[:_FINDINGS]
    ]
    return _box(
        _line(_label(report.verdict), " ", _shown(report.sentence)),
        _table(["module", "tensor", "step", "finding"], rows, numbers=(2,)) if rows else "",
        _more(len(report.births) - len(rows)),
        _notes(report.notes),
        _dim(text(f"{plural(len(report), 'record')} of {_name(report.path)}")),
    )


def run_html(run: ShownRun) -> str:
    """Return the facts of the run and the counts of its coverage."""
    info = run.info
    steps = f"{plural(len(run.steps), 'step')} ({numbers_in_short(run.steps)})" if run.steps else "no step"
    rows = [
        ("model", str(info.get("model") or "")),
        ("ran on", ran_on(info)),
        ("started", when(info["started"]) if "started" in info else ""),
        ("recorded", f"{steps}, {plural(len(run.ranks), 'rank')}, {plural(len(run), 'record')}"),
        ("modules", _coverage_counts(run.coverage)),
    ]
    return _box(
        _line(_label("finished" if run.finished else "not finished"), " ", element("b", text(_name(run.path)))),
        _facts(rows),
        _notes(run.notices),
    )


def tap_html(title: str, stats: Mapping[str, Any], coverage: Sequence[Coverage], notices: Sequence[str]) -> str:
    """Return the state of the tap, the amount written and the counts of its coverage."""
    written = f"{plural(stats['records'], 'record')}, {nbytes(stats['bytes'])}" if "records" in stats else "nothing"
    rows = [
        ("steps", count(stats["steps"])),
        ("written", written),
        ("in hooks", f"{stats['seconds_in_hooks']:.3g} s"),
        ("modules", _coverage_counts({0: coverage})),
    ]
    return _box(_line(element("b", text(_name(title.strip("<>"), 2 * _NAME)))), _facts(rows), _notes(notices))


def coverage_html(coverage: Mapping[int, Sequence[Coverage]]) -> str:
    """Return the modules with their status; those that were not fully seen come first."""
    every = [(rank, row) for rank, rows in coverage.items() for row in rows]
    every.sort(key=lambda each: each[1].status == "seen" and not each[1].reason)
    ranks = len(coverage) > 1
    titles = [*(["rank"] if ranks else []), "module", "class", "status", "calls", "reason"]
    rows = [
        [
            *([str(rank)] if ranks else []),
            _name(display_name(row.module)),
            _name(row.cls),
            row.status,
            count(row.calls),
            row.reason,
        ]
        for rank, row in every[:_MODULES]
    ]
    numbers = (titles.index("calls"), *((0,) if ranks else ()))
    return _box(
        _line(text(_coverage_counts(coverage))),
        _table(titles, rows, numbers) if rows else "",
        _more(len(every) - len(rows)),
    )


# --- parts ---------------------------------------------------------------------------------------------------------
def _pairs_table(comparison: Comparison) -> str:
    at = pairs.place(comparison, comparison.first)
    if at is None:
        return ""
    rows = pairs.rows_of(comparison, pairs.around(comparison, at, _PAIRS_BEFORE, _PAIRS_AFTER))
    cells = [
        [
            _name(display_name(row["module"])),
            _name(f"{row['kind']} {row['path']}"),
            str(row["step"]),
            pairs.error(row),
            rough(pairs.value(row, "tolerance")),
            pairs.status_text(row),
        ]
        for row in rows
    ]
    bold = [number for number, row in enumerate(rows) if row["birth"]]
    return _table(["module", "tensor", "step", "rel. error", "allowed", "status"], cells, (2, 3, 4), bold)


def _coverage_counts(coverage: Mapping[int, Sequence[Coverage]]) -> str:
    """Count modules by status: "34 seen, 2 never called"."""
    modules: dict[str, set[str]] = {}
    for rows in coverage.values():
        for row in rows:
            modules.setdefault(row.status, set()).add(row.module)
    return ", ".join(f"{count(len(names))} {status}" for status, names in modules.items()) or "coverage not recorded"


def _table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = (), bold: Sequence[int] = ()
) -> str:
    right = set(numbers)
    styles = [_CELL + ("right" if at in right else "left") for at in range(len(titles))]
    head = "".join(element("th", text(title), style=style) for title, style in zip(titles, styles, strict=True))
    body = [
        element(
            "tr",
            *(element("td", _shown(cell), style=style) for cell, style in zip(row, styles, strict=True)),
            style="font-weight:600" if at in bold else None,
        )
        for at, row in enumerate(rows)
    ]
    return element("table", element("thead", element("tr", head)), element("tbody", *body), style=_TABLE)


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    body = [
        element(
            "tr", element("th", text(name), style=f"{_CELL}left"), element("td", _shown(words), style=f"{_CELL}left")
        )
        for name, words in rows
        if words
    ]
    return element("table", element("tbody", *body), style=_TABLE)


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = [element("li", _shown(note)) for note in notes[:_NOTES]]
    return element("ul", *items, style="margin:4px 0 4px 1.5em;padding:0") + _more(len(notes) - len(items))


def _more(rest: int) -> str:
    return _dim(f"and {count(rest)} more") if rest > 0 else ""


def _label(word: str) -> str:
    words, colours = _LABELS.get(word, (word, _UNSURE))
    return element("span", text(words), style=_LABEL + colours)


def _box(*parts: str) -> str:
    return element("div", *parts, style=_BOX)


def _line(*inside: str) -> str:
    return element("p", *inside, style=_LINE)


def _dim(inside: str) -> str:
    return element("p", inside, style=_DIM)


def _name(name: object, most: int = _NAME) -> str:
    return middle(clean(name), most)


def _shown(words: object) -> str:
    """Return escaped text of bounded length."""
    said = clean(words)
    return text(said if len(said) <= _TEXT else f"{said[: _TEXT - 1]}…")

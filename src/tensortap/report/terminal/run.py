"""A run on the terminal: its facts, its coverage and its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from tensortap.core.records import Coverage, display_name
from tensortap.report.facts import RunFacts, ran_on
from tensortap.report.terminal import table
from tensortap.report.terminal.records_table import RecordsView, columns_of, heading, remainder
from tensortap.report.wording import clean, count, middle, nbytes, numbers_in_short, plural, when, wrap

__all__ = ["CoverageGroup", "RunPage", "build", "render"]

_LABEL = 10
_STATUSES = ("seen", "never called", "no gradient", "skipped", "alias")
_GROUPS = 6
_CALLS = 12
_WIDTH = 160  # of a list of names without a terminal


@dataclass(frozen=True)
class CoverageGroup:
    """Modules with the same status and reason."""

    status: str
    reason: str
    modules: Sequence[tuple[str, str, int]]
    """Name, class, calls."""
    ranks: Sequence[int] = ()
    """Empty if it applies to all ranks."""


@dataclass(frozen=True)
class RunPage:
    """The contents of the page, before layout."""

    title: str
    state: str
    facts: Sequence[tuple[str, str]]
    counts: Mapping[str, int]
    """Modules by status."""
    groups: Sequence[CoverageGroup]
    """Modules that were not fully seen; all modules with `all_coverage`."""
    all_coverage: bool
    notices: Sequence[str]
    view: RecordsView


def build(facts: RunFacts, view: RecordsView, all_coverage: bool = False) -> RunPage:
    """Build the page about a run; `all_coverage` lists every module, seen or not."""
    groups = _groups(facts)
    return RunPage(
        title=clean(facts.path),
        state="finished" if facts.finished else "not finished",
        facts=[(label, clean(text)) for label, text in _facts(facts) if text],
        counts=_counts(groups),
        groups=groups if all_coverage else [g for g in groups if g.status != "seen" or g.reason],
        all_coverage=all_coverage,
        notices=[clean(text) for text in facts.notices],
        view=view,
    )


def render(page: RunPage, width: int | None) -> list[Text]:
    """Return the page as lines of at most `width` cells; without a width, nothing is cut or wrapped."""
    state = Text(page.state, "green" if page.state == "finished" else "yellow")
    title = Text(page.title if width is None else middle(page.title, width - len(page.state) - 3), "bold")
    lines = [Text.assemble(title, " · ", state), Text()]
    for label, text in page.facts:
        lines += _entry(label, text, width)
    lines += _coverage_lines(page, width)
    for at, notice in enumerate(page.notices):
        lines += _entry("" if at else "notices", f"! {notice}", width, "yellow")
    lines += [Text(), *_wrapped(heading(page.view), width, "bold")]
    if page.view.records:
        lines += table.lines(columns_of(page.view), width)
    if rest := remainder(page.view):
        lines += _wrapped(rest, width, "dim")
    lines += _listed("layout", [f"{name}: {words}" for name, words in page.view.layouts], width)
    calls = [f"{display_name(module)}: {words}" for module, words in page.view.calls]
    return lines + _listed("called with", calls, width)


# --- the data ------------------------------------------------------------------------------------------------------
def _facts(facts: RunFacts) -> list[tuple[str, str]]:
    info = facts.info
    model = str(info.get("model", ""))
    if isinstance(info.get("modules"), int):
        model += f", {plural(info['modules'], 'module')}"
    what = f"{plural(facts.records, 'record')} of {plural(facts.tensors, 'distinct tensor')}"
    if facts.records:
        kept = "all bytes kept" if facts.kept == facts.records else f"bytes kept of {plural(facts.kept, 'record')}"
        what += f"; {kept if facts.kept else 'summaries only'}"
    ranks = plural(len(facts.ranks), "rank")
    world = info.get("world")
    if isinstance(world, int) and world != len(facts.ranks):
        ranks = f"{len(facts.ranks)} of {plural(world, 'rank')}"
    steps = plural(len(facts.steps), "step")
    if facts.steps:
        steps += f" ({numbers_in_short(facts.steps)})"
    return [
        ("model", model),
        ("ran on", ran_on(info)),
        ("started", when(info["started"]) if "started" in info else ""),
        ("captured", f"{steps}, {ranks}"),
        ("mesh", facts.mesh),
        ("records", what),
        ("on disk", nbytes(facts.bytes_on_disk)),
    ]


def _groups(facts: RunFacts) -> list[CoverageGroup]:
    """Group modules by status and reason, and by the ranks that share them."""
    where: dict[tuple[str, str, str, str], dict[int, Coverage]] = {}
    for rank, rows in facts.coverage.items():
        for row in rows:
            where.setdefault((row.status, row.reason, row.module, row.cls), {})[rank] = row
    grouped: dict[tuple[str, str, tuple[int, ...]], list[tuple[str, str, int]]] = {}
    everywhere = tuple(facts.coverage)
    for (status, reason, module, cls), by_rank in where.items():
        ranks = () if tuple(by_rank) == everywhere else tuple(by_rank)
        calls = sum(row.calls for row in by_rank.values())
        grouped.setdefault((clean(status), clean(reason), ranks), []).append(
            (clean(display_name(module)), clean(cls), calls)
        )
    found = [CoverageGroup(status, reason, modules, ranks) for (status, reason, ranks), modules in grouped.items()]
    known = {status: place for place, status in enumerate(_STATUSES)}
    return sorted(found, key=lambda group: (known.get(group.status, len(known)), not group.reason))


def _counts(groups: Sequence[CoverageGroup]) -> dict[str, int]:
    names: dict[str, set[str]] = {}
    for group in groups:
        names.setdefault(group.status, set()).update(name for name, _, _ in group.modules)
    return {status: len(modules) for status, modules in names.items()}


# --- the lines -----------------------------------------------------------------------------------------------------
def _coverage_lines(page: RunPage, width: int | None) -> list[Text]:
    if not page.counts:
        return _entry("coverage", "not recorded", width)
    said = ", ".join(f"{count(n)} {status}" for status, n in page.counts.items())
    lines = _entry("coverage", said, width)
    capped = page.groups if page.all_coverage else page.groups[:_GROUPS]
    for group in capped:
        ranks = f" on {'rank' if len(group.ranks) == 1 else 'ranks'} {numbers_in_short(group.ranks)}"
        about = f"{group.status}{ranks if group.ranks else ''}{': ' if group.reason else ''}{group.reason}"
        lines += _entry("", about, width, "" if group.status == "seen" else "yellow")
        if page.all_coverage:
            lines += _all_modules(group, width)
        else:
            names = [name for name, _, _ in group.modules]
            lines.append(Text(" " * (_LABEL + 4) + _some(names, (width or _WIDTH) - _LABEL - 4)))
    left = len(page.groups) - len(capped)
    if left:
        lines += _entry("", f"and {plural(left, 'more group')} of modules: --coverage lists all", width, "dim")
    return lines


def _all_modules(group: CoverageGroup, width: int | None) -> list[Text]:
    names, classes, calls = zip(*group.modules, strict=True)
    columns = [
        table.TableColumn("module", names, left=True, least=20),
        table.TableColumn("class", classes, left=True, least=10),
        table.TableColumn("calls", [plural(n, "call") for n in calls]),
    ]
    return table.lines(columns, width, indent=_LABEL + 4)[1:]


def _listed(title: str, entries: Sequence[str], width: int | None) -> list[Text]:
    if not entries:
        return []
    lines = [Text(), Text(title, "bold")]
    for entry in entries[:_CALLS]:
        lines += _wrapped(clean(entry), width, "")
    left = len(entries) - _CALLS
    return lines + (_wrapped(f"and {count(left)} more: --module chooses", width, "dim") if left > 0 else [])


def _some(names: Sequence[str], room: int) -> str:
    """Return as many names as fit into one line; the first one in any case, cut if necessary."""
    text = ""
    for at, name in enumerate(names):
        rest = len(names) - at - 1
        tail = f" and {rest} more" if rest else ""
        longer = f"{text}, {name}" if text else middle(name, max(8, room - len(tail)))
        if cell_len(longer) + len(tail) > room and text:
            return f"{text} and {rest + 1} more"
        text = longer
    return text


def _entry(label: str, text: str, width: int | None, style: str = "") -> list[Text]:
    """Return a label with a text that is wrapped in its own column."""
    body = wrap(text, None if width is None else width - _LABEL - 2)
    labels = [label, *[""] * (len(body) - 1)]
    return [
        Text.assemble(("  " + each.ljust(_LABEL), "dim"), (part, style))
        for each, part in zip(labels, body, strict=True)
    ]


def _wrapped(text: str, width: int | None, style: str) -> list[Text]:
    return [Text(part, style) for part in wrap(text, width)]

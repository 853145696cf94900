"""Records as a table: identity, shape and dtype, and as many statistics as fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensortap.core import statistics
from tensortap.core.records import Record, Summary, display_name
from tensortap.core.statistics import Statistic
from tensortap.report.terminal.table import TableColumn
from tensortap.report.wording import clean, count, dtype, number, plural, shape

__all__ = ["RecordsView", "columns_of", "heading", "remainder"]

_SEQ_PRIORITY = 8
_ADDED = (100, 1)  # position and priority of a statistic that was registered without any


@dataclass(frozen=True)
class RecordsView:
    """Selected records of a run, and their counts."""

    records: Sequence[Record]
    matching: int
    """Number of records that pass the filters."""
    total: int
    """Number of records of the run."""
    sort: str = "seq"
    """A column's name; with a minus before it, the largest comes first."""
    ranks: int = 1
    """Number of ranks of the run: with several, each row shows its rank."""
    hint: str = ""
    """A suggestion if nothing matches."""
    calls: Sequence[tuple[str, str]] = ()
    layouts: Sequence[tuple[str, str]] = ()
    """Records of one module, and where each sits in its whole, in words."""
    """Modules of the records that got plain arguments, with the arguments in words."""

    @property
    def hidden(self) -> int:
        return self.matching - len(self.records)


def columns_of(view: RecordsView) -> list[TableColumn]:
    """Return all columns in order; the layout drops those that do not fit."""
    records, sorted_by = view.records, view.sort.lstrip("-")
    result = []
    if len({r.key.step for r in records}) > 1:
        result.append(TableColumn("step", [str(r.key.step) for r in records]))
    if view.ranks > 1:
        result.append(TableColumn("rank", [str(r.rank) for r in records]))
    result.append(TableColumn("module", [clean(display_name(r.key.module)) for r in records], left=True, least=22))
    result.append(TableColumn("class", [clean(r.cls) for r in records], left=True, optional=11))
    if any(r.key.phase == "eval" for r in records):
        result.append(TableColumn("phase", [r.key.phase for r in records], left=True))
    counters = {name: [getattr(r.key, name) for r in records] for name in ("micro", "call")}
    result += [TableColumn(name, list(map(str, values))) for name, values in counters.items() if any(values)]
    result.append(TableColumn("tensor", [clean(f"{r.key.kind} {r.key.path}") for r in records], left=True, least=17))
    result.append(TableColumn("shape", [shape(r.shape) for r in records], left=True, least=16))
    result.append(TableColumn("dtype", [dtype(clean(r.dtype)) for r in records], left=True))
    for each, priority in _shown_statistics():
        cells = [_cell(each, r.summary) for r in records]
        result.append(TableColumn(each.name, cells, optional=0 if each.name == sorted_by else priority))
    result.append(TableColumn("seq", [str(r.seq) for r in records], optional=_SEQ_PRIORITY))
    if any(r.summary.nonfinite for r in records):
        result.append(TableColumn("non-finite", [nonfinite(r.summary) for r in records], left=True, style="bold red"))
    return result


def _shown_statistics() -> list[tuple[Statistic, int]]:
    """Return the statistics that are columns, in order, with the priority of each; see `statistics.Display`."""
    shown = ((each, each.show.terminal or (_ADDED if each.is_added else None)) for each in statistics.listed())
    placed = sorted(((each, at) for each, at in shown if at is not None), key=lambda entry: entry[1][0])
    return [(each, priority) for each, (_, priority) in placed]


def _cell(statistic: Statistic, summary: Summary) -> str:
    value = summary[statistic.name] if statistic.derive is None else statistic.derive(summary.__getitem__)
    if value is None:
        return "–"
    if statistic.show.form == "share":
        return _share(value, summary.elements)
    return count(value) if statistic.show.form == "count" else number(float(value))


def nonfinite(summary: Summary) -> str:
    """Return a sign and a word, so that nothing depends on colour alone.

    An ordinary tensor has an empty cell; others "✗ 3 NaN", "✗ 12 Inf", "✗ all NaN", "✗ 3 NaN 12 Inf".
    """
    counted = {"NaN": summary.nan, "Inf": summary.posinf + summary.neginf}
    parts = [f"{'all' if n == summary.elements else count(n)} {word}" for word, n in counted.items() if n]
    return " ".join(["✗", *parts]) if parts else ""


def heading(view: RecordsView) -> str:
    """Return the number of records and their order as a heading."""
    shown_now, matching, total = len(view.records), view.matching, view.total
    if not total:
        return "no records"
    if not matching:
        return f"none of the {plural(total, 'record')} matches"
    said = f"{count(shown_now)} of {plural(matching, 'record')}" if view.hidden else plural(matching, "record")
    if matching < total:
        said += f" that match{'es' if matching == 1 else ''} ({count(total)} in all)"
    steps = {r.key.step for r in view.records}
    if len(steps) == 1:
        said += f", step {steps.pop()}"
    return f"{said}, {_order(view.sort)}"


def remainder(view: RecordsView) -> str:
    """Return the number of records that are not shown, and the options that show them."""
    if not view.matching:
        return view.hint
    if not view.hidden:
        return ""
    return f"{count(view.hidden)} more: --limit 0 shows all; --module, --kind and --step filter"


def _order(sort: str) -> str:
    name = sort.lstrip("-")
    if name == "seq":
        return "last first" if sort.startswith("-") else "in execution order"
    if name in ("module", "kind", "dtype", "class"):
        return f"by {name}" + (", backwards" if sort.startswith("-") else "")
    return f"{'largest' if sort.startswith('-') else 'smallest'} {name} first"


def _share(part: int, whole: int) -> str:
    if not part:
        return "0"
    share = 100 * part / whole
    return "100%" if part == whole else f"{min(share, 99.9):.1f}%" if share >= 0.05 else "<0.1%"

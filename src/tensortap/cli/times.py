"""`tensortap times`: attribute the time of a profile to modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tensortap.times import TimeLedger

__all__ = ["times"]

ROWS = 30


def times(
    trace: Annotated[
        str,
        typer.Argument(metavar="TRACE", help="A .json or .json.gz exported by a profiler.", show_default=False),
    ],
    against: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Compare with this trace, the reference.", show_default=False)
    ] = None,
    by: Annotated[str, typer.Option(metavar="WHAT", help="One row per module or class.")] = "module",
    depth: Annotated[
        int | None, typer.Option(metavar="N", help="Fold modules below N levels of names.", show_default=False)
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="own, total, device_own, device_total, calls, memory, device_memory, module, class, phase or order; "
            "-own is smallest first.  [default: device_own, or own if nothing ran on a device]",
            show_default=False,
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            metavar="N", help=f"Rows to show, 0 for all.  [default: {ROWS}; all in files]", show_default=False
        ),
    ] = None,
    per_step: Annotated[bool, typer.Option("--per-step", help="Divide times by the number of steps.")] = False,
    csv: Annotated[str | None, typer.Option(metavar="PATH", help="Write the rows as CSV; - is stdout.")] = None,
    json: Annotated[str | None, typer.Option(metavar="PATH", help="Write everything as JSON; - is stdout.")] = None,
    html: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write a page with an icicle of modules, in one file.")
    ] = None,
) -> None:
    """Show which modules spend the time of a profile.

    Annotate the model while the profiler runs: `with tensortap.annotate(model): ...`. Reads the traces of torch's
    `export_chrome_trace` and of paddle's `Profiler.export`.

    \b
    Example:
      tensortap times trace.json
      tensortap times trace.json.gz --by class --sort total
      tensortap times trace.json --depth 2 --html times.html
      tensortap times after.json --against before.json --per-step
      tensortap times trace.json --json - | jq '.rows[0]'
    """
    from tensortap.cli.compare import parse_outputs
    from tensortap.errors import UsageError
    from tensortap.report.files import output

    outputs = parse_outputs({"csv": csv, "json": json, "html": html})
    if against is not None and html is not None:
        raise UsageError("--html shows one trace: drop --against, or write a page for each trace")
    if top is not None and top < 0:
        raise UsageError(f"--top {top}: use a number of rows, or 0 for all")
    sides = [_read(path, per_step) for path in (trace, *([against] if against is not None else []))]
    options: dict[str, Any] = {"by": by, "depth": depth, "sort": sort}
    names = [trace, *([against] if against is not None else [])]
    shown = _facts(sides, names, per_step, {**options, "top": ROWS if top is None else top})
    if output.STDOUT not in outputs.values():
        _print(shown)
    _write(outputs, _facts(sides, names, per_step, {**options, "top": top}), sides[0], trace)


def _read(path: str, per_step: bool) -> TimeLedger:
    from tensortap.cli import screen
    from tensortap.times import attribute, read_profile

    with screen.progress(f"reading {path}") as progress:
        timeline = read_profile(path, progress)
    with screen.waiting(f"adding up {path}"):
        ledger = attribute(timeline)
    return ledger.per_step() if per_step else ledger


def _facts(sides: list[TimeLedger], names: list[str], per_step: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data of one trace, or of two compared."""
    from tensortap.times.comparison import compare_times
    from tensortap.times.facts import facts_of
    from tensortap.times.table import make_table

    if len(sides) == 1:
        return {**facts_of(sides[0], make_table(sides[0], **options)), "trace": names[0], "per_step": per_step}
    facts = compare_times(sides[0], sides[1], **options)
    for side, name in zip(("candidate", "reference"), names, strict=True):
        facts[side] = {**facts[side], "trace": name, "per_step": per_step}
    return facts


def _print(facts: Mapping[str, Any]) -> None:
    from tensortap.cli import screen
    from tensortap.report.terminal.times import compared_page, times_page

    page = compared_page if "measure" in facts else times_page
    screen.print_lines(page(facts, screen.width()))


def _write(outputs: Mapping[str, str], facts: Mapping[str, Any], ledger: TimeLedger, trace: str) -> None:
    from tensortap.report.files import output, times_csv, times_json

    for name, path in outputs.items():
        with output.opened(path) as file:
            if name == "csv":
                times_csv.write(facts, file)
            elif name == "json":
                times_json.write(facts, file)
            else:
                _write_page(ledger, trace, facts, file)


def _write_page(ledger: TimeLedger, trace: str, facts: Mapping[str, Any], file: Any) -> None:
    from tensortap.report.html import times as times_html
    from tensortap.times.icicle import icicle_of

    times_html.write(facts, icicle_of(ledger), file)

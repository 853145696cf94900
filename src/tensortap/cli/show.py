"""`tensortap show`: print the contents of a run."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tensortap.cli.gather import Choice

__all__ = ["print_page", "show"]

ROWS = 20


def show(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run, a dump, an export, an .npz or a checkpoint; a path or URL.", show_default=False
        ),
    ],
    module: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help='Only matching modules; "(root)" is the model.')
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(metavar="KIND", help="Only input, output, grad_output, ...")] = None,
    step: Annotated[str, typer.Option(metavar="STEPS", help="Only these: 3 or 0,5 or 10-20 or last.")] = "",
    phase: Annotated[
        list[str] | None, typer.Option(metavar="PHASE", help="Only forward, backward, state or eval.")
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(metavar="N", help="Only these ranks.")] = None,
    nonfinite: Annotated[bool, typer.Option("--nonfinite", help="Only tensors with a NaN or an infinity.")] = False,
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help="Sort by seq, l2, std, absmax, nan, ...; -l2 is largest first.")
    ] = "seq",
    limit: Annotated[
        int | None, typer.Option(metavar="N", help=f"Rows to show, 0 for all.  [default: {ROWS}; all with --json]")
    ] = None,
    coverage: Annotated[bool, typer.Option("--coverage", help="List all modules with their coverage.")] = False,
    loop: Annotated[
        bool, typer.Option("--loop", help="Show the loop over its steps: lr, gradient norm, random states, ...")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    sketch: Annotated[bool, typer.Option("--sketch", help="With --json: include sketches.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check the bytes of kept tensors against digests.")] = False,
) -> None:
    """Show what ran, the coverage of the model, and its records.

    Options that select records may be repeated.

    \b
    Example:
      tensortap show runs/a --module "layers.0.*" --kind grad_output --sort -l2
      tensortap show runs/a --nonfinite --limit 1     the first NaN
      tensortap show runs/a --loop --step 10-20       learning rates, gradient norms, random states
      tensortap show s3://bucket/runs/a --verify
    """
    from tensortap.cli.gather import Choice
    from tensortap.errors import UsageError

    if limit is not None and limit < 0:
        raise UsageError(f"--limit {limit}: use a number of rows, or 0 for all")
    if sketch and not json:
        raise UsageError("--sketch needs --json: sketches are only part of the JSON")
    if verify:
        _verify(run)
    choice = Choice(module or (), kind or (), phase or (), step, rank or (), nonfinite, sort)
    if json:
        _print_json(run, choice, limit or 0, sketch, loop)
    elif loop:
        _print_loop(run, choice, ROWS if limit is None else limit)
    else:
        print_page(run, choice, ROWS if limit is None else limit, coverage)


def print_page(path: str | Path, choice: Choice, limit: int = ROWS, coverage: bool = False) -> None:
    """Print the run as a page."""
    import tensortap
    from tensortap.cli import gather, screen
    from tensortap.report.terminal import run as run_page
    from tensortap.report.terminal.records_table import RecordsView

    with screen.waiting(f"reading {path}"), tensortap.open(path) as run:
        chosen = gather.choose(run, choice)
        hint = "" if len(chosen) else gather.suggestion(run, choice.modules)
        records = list(chosen.records(limit))
        view = RecordsView(
            records,
            len(chosen),
            len(run),
            choice.sort,
            len(run.ranks),
            hint,
            gather.calls_of(run, records),
            gather.layouts_of(run, list(chosen.records())) if choice.modules else (),
        )
        lines = run_page.render(run_page.build(gather.facts_of(run), view, coverage), screen.width())
    screen.print_lines(lines)


def _print_loop(path: str, choice: Choice, limit: int) -> None:
    """Print what the training loop did, step by step."""
    import tensortap
    from tensortap.cli import gather, screen
    from tensortap.cli.loop_facts import loop_page
    from tensortap.report.terminal import loop as page

    with screen.waiting(f"reading {path}"), tensortap.open(path) as run:
        steps = gather.parse_steps_filter(choice.steps, run.steps) if choice.steps else run.steps
        lines = page.render(loop_page(run, next(iter(choice.ranks), None), steps, limit), screen.width())
    screen.print_lines(lines)


def _verify(path: str) -> None:
    """Check all kept tensors, and report the result on the error stream, apart from the page or JSON."""
    import tensortap
    from tensortap.cli import screen

    with tensortap.open(path) as run:
        with screen.progress("verifying") as progress:
            found = run.verify(progress)
        found.check(path)
    screen.console(stderr=True).print(
        f"verified {found.tensors} kept tensors: their bytes match their digests{_traffic_so_far()}"
    )


def _traffic_so_far() -> str:
    """Return the amount read from an object store, as the end of a line; nothing for local files."""
    from tensortap.report.wording import nbytes

    remote = sys.modules.get("tensortap.store.remote")  # loaded only if a URL was read
    if remote is None:
        return ""
    return f"; {remote.traffic.requests} requests, {nbytes(remote.traffic.nbytes)} read"


def _print_json(path: str, choice: Choice, limit: int, sketch: bool, loop: bool) -> None:
    import tensortap
    from tensortap.cli import gather, screen
    from tensortap.cli.loop_facts import loop_objects
    from tensortap.report.files import output, run_json

    with tensortap.open(path) as run:
        with screen.waiting(f"reading {path}"):
            chosen, facts = gather.choose(run, choice), gather.facts_of(run)
            told = loop_objects(run, choice.ranks or run.ranks) if loop else None
        text = run_json.text(facts, chosen.records(limit, sketch), len(chosen), sketch, run.arguments, told)
        spinner = nullcontext() if sys.stdout.isatty() else screen.waiting("writing JSON")  # not across the text itself
        with spinner, output.opened(output.STDOUT) as file:
            file.writelines(output.encoded(text))

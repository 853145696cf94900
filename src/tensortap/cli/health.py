"""`tensortap health`: check a single run for suspicious tensors."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tensortap.cli.outputs import Quiet
from tensortap.cli.pairing import Kinds, Modules, Ranks, Steps, options_for_one_run, parse_options

__all__ = ["health"]

_EXIT_CODES = {"healthy": 0, "suspicious": 1, "empty": 3}


def health(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or another file of tensors.", show_default=False)],
    step: Steps = "",
    rank: Ranks = None,
    module: Modules = None,
    kind: Kinds = None,
    json: Annotated[str | None, typer.Option(metavar="PATH", help="Everything as JSON; - is stdout.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show all findings.")] = False,
    quiet: Quiet = False,
) -> None:
    """Check a single run: NaN, dead or exploding layers, replicas.

    Ends with 0 if nothing is suspicious, 1 if something is, 2 if the run cannot be read, 3 if it has no records.
    `tensortap report RUN` shows the same on a page.

    \b
    Example:
      tensortap health runs/a
      tensortap health runs/a --module "layers.*" --kind grad_output
      tensortap health runs/a --json - | jq .findings
    """
    import tensortap
    from tensortap.cli import screen
    from tensortap.report.files import health_json, output
    from tensortap.report.terminal import health as health_page
    from tensortap.report.wording import clean

    if json is not None:
        output.check(json)
    chosen = options_for_one_run(
        parse_options(None, None, step, rank, module, kind, None, None, None, None, None, None, None, "cpu")
    )
    with screen.waiting(f"reading {run}"):
        report = tensortap.health(run, **chosen)
    if not quiet and json == output.STDOUT:
        typer.echo(clean(report.sentence), err=True)
    elif not quiet:
        screen.print_lines(health_page.render(health_page.build(report, verbose), screen.width()))
    if json is not None:
        with output.opened(json) as file:
            health_json.write(report, file)
    sys.stdout.flush()
    raise typer.Exit(_EXIT_CODES[report.verdict])

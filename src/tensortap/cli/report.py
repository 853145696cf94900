"""`tensortap report`: a page to look at, in one file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from tensortap.cli.pairing import (
    Atol,
    Kinds,
    MapFile,
    Modules,
    Noise,
    Ranks,
    Rename,
    Rtol,
    Steps,
    Workers,
    options,
)

if TYPE_CHECKING:
    from tensortap.records import Comparison

__all__ = ["report"]


def report(
    reference: Annotated[
        str, typer.Argument(metavar="REFERENCE", help="The run to trust, or the only one.", show_default=False)
    ],
    candidate: Annotated[
        str | None, typer.Argument(metavar="[CANDIDATE]", help="The run to judge.", show_default=False)
    ] = None,
    out: Annotated[str, typer.Option("-o", "--out", metavar="PATH", help="The page; - is stdout.")] = "report.html",
    rename: Rename = None,
    map_file: MapFile = None,
    step: Steps = "",
    rank: Ranks = None,
    module: Modules = None,
    kind: Kinds = None,
    rtol: Rtol = None,
    atol: Atol = None,
    noise: Noise = None,
    workers: Workers = None,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="End with 0 even if the runs diverge.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing; the exit code says it.")] = False,
) -> None:
    """Write a page about two runs, or about one: a single file that opens from disk and needs no network.

    Of two runs it shows where they part, how far each tensor is apart and what is known of it; it ends with the same
    codes as compare. Of one run it shows its statistics, where NaN appears, and layers that are dead or explode.

    \b
    Example:
      tensortap report runs/a runs/b -o report.html
      tensortap report runs/a -o run.html
    """
    import tensortap
    from tensortap.cli import screen
    from tensortap.cli.compare import EXIT_CODES
    from tensortap.report import comparison_html, output
    from tensortap.report.wording import clean

    output.check(out)
    chosen = options(rename, map_file, step, rank, module, kind, rtol, atol, noise, workers)
    function: Callable[..., Comparison] = tensortap.compare
    with screen.comparing(not quiet) as progress:
        result = function(reference, candidate, **chosen, details=comparison_html.DETAILS, progress=progress)
    with screen.waiting(f"writing {out}"), output.opened(out) as file:
        comparison_html.write(result, file)
    if not quiet:
        typer.echo(clean(result.sentence), err=out == output.STDOUT)
        if out != output.STDOUT:
            typer.echo(f"The page is {clean(out)}")
    raise typer.Exit(0 if exit_zero else EXIT_CODES[result.verdict])

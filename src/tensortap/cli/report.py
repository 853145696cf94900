"""`tensortap report`: write a page for a browser, in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensortap.cli.outputs import ExitZero, Quiet
from tensortap.cli.pairing import (
    Address,
    Atol,
    Device,
    Engine,
    Kinds,
    MapFile,
    MaybeCandidate,
    Modules,
    Noise,
    OnlyOrReference,
    Ranks,
    Rename,
    Rtol,
    Steps,
    Truth,
    Workers,
    options_for_one_run,
    parse_options,
)

if TYPE_CHECKING:
    from tensortap.core.records import Comparison

__all__ = ["report"]

_NOTHING = 3  # as for two runs with nothing in common

_OTHER_FORMATS = {
    ".json": "--json",
    ".csv": "--csv",
    ".parquet": "--parquet",
    ".xml": "--junit",
    ".md": "--markdown",
}
"""Suffixes of other reports, and the option of `compare` that writes each."""


def report(
    reference: OnlyOrReference,
    candidate: MaybeCandidate = None,
    out: Annotated[str, typer.Option("-o", "--out", metavar="PATH", help="Output file; - is stdout.")] = "report.html",
    rename: Rename = None,
    map_file: MapFile = None,
    step: Steps = "",
    rank: Ranks = None,
    module: Modules = None,
    kind: Kinds = None,
    rtol: Rtol = None,
    atol: Atol = None,
    noise: Noise = None,
    truth: Truth = None,
    workers: Workers = None,
    engine: Engine = None,
    address: Address = None,
    device: Device = "cpu",
    exit_zero: ExitZero = False,
    quiet: Quiet = False,
) -> None:
    """Write a page about two runs, or about one.

    The page is a single file that opens from disk and needs no network. For two runs it shows where they diverge and
    how far each pair of tensors differs; the exit codes are those of compare. For one run it shows statistics, the
    first NaN, and layers that are dead or explode; the exit code is 0, or 3 if no record is selected.

    \b
    Example:
      tensortap report runs/a runs/b -o report.html
      tensortap report runs/a -o run.html
    """
    from tensortap.report.files import output

    _check_suffix(out)
    output.check(out)
    chosen = parse_options(
        rename, map_file, step, rank, module, kind, rtol, atol, noise, truth, workers, engine, address, device
    )
    if candidate is None:
        sentence, code = _about_one(reference, chosen, out)
    else:
        sentence, code = _about_two(reference, candidate, chosen, out, quiet)
    if not quiet:
        typer.echo(sentence, err=out == output.STDOUT)
        if out != output.STDOUT:
            typer.echo(f"Page written to {out}")
    raise typer.Exit(0 if exit_zero else code)


def _check_suffix(out: str) -> None:
    """Raise UsageError if the name asks for a format that another command writes."""
    from pathlib import PurePath

    from tensortap.errors import UsageError

    suffix = PurePath(out).suffix.lower()
    if flag := _OTHER_FORMATS.get(suffix):
        raise UsageError(f"-o {out}: report writes HTML; `tensortap compare A B {flag} {out}` writes this format")


def _about_two(reference: str, candidate: str, chosen: Mapping[str, Any], out: str, quiet: bool) -> tuple[str, int]:
    """Write the page; return the sentence and the exit code."""
    import tensortap
    from tensortap.cli import screen
    from tensortap.core.records import EXIT_CODES
    from tensortap.report.files import output
    from tensortap.report.html import comparison as comparison_html
    from tensortap.report.wording import clean

    function: Callable[..., Comparison] = tensortap.compare
    with screen.comparing(not quiet) as progress:
        result = function(reference, candidate, **chosen, details=comparison_html.DETAILS, progress=progress)
    with screen.waiting(f"writing {out}"), output.opened(out) as file:
        comparison_html.write(result, file)
    return clean(result.sentence), EXIT_CODES[result.verdict]


def _about_one(path: str, chosen: Mapping[str, Any], out: str) -> tuple[str, int]:
    """Write the page; return the sentence and the exit code. Only a page without records is a failure."""
    import tensortap
    from tensortap.cli import gather, screen
    from tensortap.report.files import output
    from tensortap.report.html import run as run_html
    from tensortap.report.wording import clean

    with screen.waiting(f"reading {path}"), tensortap.open(path) as run:
        scope = options_for_one_run(chosen)
        health = tensortap.health(run, **scope, details=run_html.DETAILS)
        facts = gather.facts_of(run)
    with screen.waiting(f"writing {out}"), output.opened(out) as file:
        run_html.write(facts, health, file)
    return clean(health.sentence), _NOTHING if health.verdict == "empty" else 0

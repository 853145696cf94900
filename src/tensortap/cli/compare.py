"""`tensortap compare`: the first divergence of two runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import typer

from tensortap.cli.outputs import Csv, ExitZero, Html, Json, Junit, Markdown, Parquet, Quiet, Verbose
from tensortap.cli.pairing import (
    Address,
    Atol,
    Candidate,
    Device,
    Engine,
    Kinds,
    MapFile,
    Modules,
    Noise,
    Ranks,
    Reference,
    Rename,
    Rtol,
    Steps,
    Truth,
    UntilFirst,
    Workers,
    Zoom,
    parse_options,
    parse_zoom,
)

if TYPE_CHECKING:
    from tensortap.core.records import Comparison

__all__ = ["compare", "conclude", "details_for", "parse_outputs"]


def compare(
    reference: Reference,
    candidate: Candidate,
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
    zoom: Zoom = None,
    until_first: UntilFirst = False,
    workers: Workers = None,
    engine: Engine = None,
    address: Address = None,
    device: Device = "cpu",
    csv: Csv = None,
    html: Html = None,
    json: Json = None,
    junit: Junit = None,
    markdown: Markdown = None,
    parquet: Parquet = None,
    verbose: Verbose = 0,
    exit_zero: ExitZero = False,
    quiet: Quiet = False,
) -> None:
    """Find the first divergence of two runs.

    Ends with 0 if the runs match, 1 if they diverge, 2 if something cannot be read or written, 3 if they have too
    little in common to judge: few records of the same name, ranks without a counterpart, a recording that stopped
    early. With --truth, 4 if they match and the candidate is less exact. Where GITHUB_STEP_SUMMARY is set, the
    Markdown page is appended to it.

    \b
    Example:
      tensortap compare runs/a runs/b
      tensortap compare runs/a runs/b --noise runs/a2         allow the differences of two equal runs
      tensortap compare runs/a runs/b --truth runs/float32     which side is less exact?
      tensortap compare gpu.npz cpu.npz                       one module: is it wrong, or its inputs?
      tensortap compare runs/a runs/b --rename 'encoder\\.(\\d+)=layers.\\1'
      tensortap compare runs/torch runs/paddle --map rules.toml
      tensortap compare runs/a runs/b --step 3:4 --kind output --module "layers.*"
      tensortap compare runs/a runs/b --device cuda           whole tensors on the GPU
      tensortap compare runs/a runs/b --engine ray --address auto
      tensortap compare runs/a runs/b --zoom train.py:build,port.py:build     down to the line
      tensortap compare runs/a runs/b --html report.html --junit out.xml --json - | jq .first
    """
    import tensortap
    from tensortap.cli import screen

    outputs = parse_outputs(
        {"csv": csv, "html": html, "json": json, "junit": junit, "markdown": markdown, "parquet": parquet}
    )
    chosen = parse_options(
        rename, map_file, step, rank, module, kind, rtol, atol, noise, truth, workers, engine, address, device
    )
    chosen |= {"until_first": until_first, "details": details_for(outputs), "zoom": parse_zoom(zoom)}
    function: Callable[..., Comparison] = tensortap.compare
    with screen.comparing(not quiet) as progress:
        result = function(reference, candidate, **chosen, progress=progress)
    conclude(result, outputs, verbose=verbose, quiet=quiet, exit_zero=exit_zero)


# --- argv ----------------------------------------------------------------------------------------------------------
def parse_outputs(given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the target of each report. Raise UsageError now, not after the comparison, if a folder is missing."""
    from tensortap.errors import UsageError
    from tensortap.report.files import output

    wanted = {name: path for name, path in given.items() if path is not None}
    for name, path in wanted.items():
        other = next(first for first, its_path in wanted.items() if its_path == path)
        if other != name:
            where = "stdout" if path == output.STDOUT else path
            raise UsageError(f"--{other} and --{name} cannot both go to {where}")
        output.check(path)
    if wanted.get("parquet") == output.STDOUT and sys.stdout.isatty():
        raise UsageError("--parquet -: Parquet is not text; send it to a file or a pipe")
    return wanted


def details_for(outputs: Mapping[str, str]) -> int:
    """Return the number of tensors to inspect element by element: only the page shows them."""
    if "html" not in outputs:
        return 0
    from tensortap.report.html import comparison as comparison_html

    return comparison_html.DETAILS


# --- output -------------------------------------------------------------------------------------------------------
def conclude(result: Comparison, outputs: Mapping[str, str], *, verbose: int, quiet: bool, exit_zero: bool) -> None:
    """Print the page, write the reports, and end with the exit code."""
    from tensortap.core.records import EXIT_CODES
    from tensortap.report.files import output

    on_stdout = output.STDOUT in outputs.values()
    if not quiet and not on_stdout:
        _print_page(result, verbose)
    elif not quiet:
        from tensortap.report.wording import clean

        typer.echo(clean(result.sentence), err=True)
    _write(result, outputs)
    _append_summary(result)
    sys.stdout.flush()  # a reader that has left must be noticed before the exit code is set
    raise typer.Exit(0 if exit_zero else EXIT_CODES[result.verdict])


def _print_page(result: Comparison, verbose: int) -> None:
    from tensortap.cli import screen
    from tensortap.report.terminal import comparison as comparison_page

    screen.print_lines(comparison_page.render(comparison_page.build(result, verbose), screen.width()))


def _write(result: Comparison, outputs: Mapping[str, str]) -> None:
    """Write all reports even if one fails: a full disk elsewhere must not cost hours of comparing."""
    from tensortap.errors import StoreWriteError
    from tensortap.report.files.saving import write_comparison

    failed: StoreWriteError | None = None
    for name, path in outputs.items():
        try:
            write_comparison(result, name, path)
        except StoreWriteError as error:  # noqa: PERF203 - writing a report costs far more
            failed = failed or error
    if failed is not None:
        raise failed


def _append_summary(result: Comparison) -> None:
    """Append to the summary of a GitHub step. A failure there must not change the result."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    from tensortap.report.files import comparison_markdown, output

    try:
        with open(path, "ab") as file:  # noqa: PTH123 - a path from the environment, taken as it is
            file.writelines(output.encoded([comparison_markdown.text(result, comparison_markdown.LIMIT - file.tell())]))
    except OSError as error:
        typer.echo(f"tensortap: GITHUB_STEP_SUMMARY could not be written: {error.strerror}", err=True)

"""`tensortap compare`: where two runs part first."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tensortap.records import Comparison

__all__ = ["compare", "steps_meant"]

EXIT_CODES = {"match": 0, "diverged": 1, "incomparable": 3}
_MOST_STEPS = 1_000_000
_PATIENCE = 2.0


def compare(
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="The run to trust.", show_default=False)],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="The run to judge.", show_default=False)],
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="'PATTERN=REPLACEMENT'", help="Rename the candidate's modules; a regular expression."),
    ] = None,
    map_file: Annotated[
        str | None, typer.Option("--map", metavar="FILE", help="A file of names that belong together.")
    ] = None,
    step: Annotated[
        str, typer.Option(metavar="STEPS", help="Only 3 or 0,5 or 10-20; 3:4 is step 3 against the candidate's 4.")
    ] = "",
    rank: Annotated[list[int] | None, typer.Option(metavar="N", help="Only these ranks.")] = None,
    module: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help='Only modules so named; "(root)" too.')
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(metavar="KIND", help="Only input, output, grad_output, ...")] = None,
    rtol: Annotated[
        float | None, typer.Option(metavar="X", help="Relative error to allow, instead of what the dtype suggests.")
    ] = None,
    atol: Annotated[float | None, typer.Option(metavar="X", help="Absolute error to allow.")] = None,
    noise: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Another run of the reference, or what tensortap.noise wrote: allow that."),
    ] = None,
    until_first: Annotated[bool, typer.Option("--until-first", help="Stop at the first divergence.")] = False,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Processes.  [default: by the machine]")] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="cuda measures whole tensors on the GPU, through torch.")
    ] = "cpu",
    csv: Annotated[str | None, typer.Option(metavar="PATH", help="All pairs as CSV; - is stdout.")] = None,
    json: Annotated[str | None, typer.Option(metavar="PATH", help="Everything as JSON; - is stdout.")] = None,
    junit: Annotated[str | None, typer.Option(metavar="PATH", help="One case a module, for CI.")] = None,
    markdown: Annotated[str | None, typer.Option(metavar="PATH", help="A page for a ticket or a comment.")] = None,
    parquet: Annotated[str | None, typer.Option(metavar="PATH", help="All pairs as Parquet.")] = None,
    verbose: Annotated[
        int,
        typer.Option("-v", "--verbose", count=True, show_default=False, help="100 rows and all else; -vv all rows."),
    ] = 0,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="End with 0 even if the runs diverge.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing; the exit code says it.")] = False,
) -> None:
    """Find the first place where two runs part, and say how far.

    Ends with 0 if the runs match, 1 if they diverge, 2 if something cannot be read or written, 3 if they have too
    little in common. Where GITHUB_STEP_SUMMARY is set, the Markdown page is appended to it.

    \b
    Example:
      tensortap compare runs/a runs/b
      tensortap compare runs/a runs/b --noise runs/a2         allow what two equal runs differ by
      tensortap compare runs/a runs/b --rename 'encoder\\.(\\d+)=layers.\\1'
      tensortap compare runs/a runs/b --step 3:4 --kind output --module "layers.*"
      tensortap compare runs/a runs/b --device cuda           whole tensors on the GPU
      tensortap compare runs/a runs/b --junit out.xml --json - | jq .first
    """
    import tensortap
    from tensortap.report import output

    outputs = _outputs({"csv": csv, "json": json, "junit": junit, "markdown": markdown, "parquet": parquet})
    options = {
        "rename": tuple(rename or ()),
        "map_file": map_file,
        "steps": steps_meant(step) if step else None,
        "ranks": rank or None,
        "rtol": _tolerance("--rtol", rtol),
        "atol": _tolerance("--atol", atol),
        "noise": tuple(noise or ()),
        "kinds": _kinds(kind or ()),
        "modules": ["" if name == "(root)" else name for name in module or ()] or "*",
        "until_first": until_first,
        "workers": _workers(workers),
        "device": device,
    }
    function: Callable[..., Comparison] = tensortap.compare
    with _bar(not quiet) as progress:
        result = function(reference, candidate, **options, progress=progress)
    on_stdout = output.STDOUT in outputs.values()
    if not quiet and not on_stdout:
        _print_page(result, verbose)
    elif not quiet:
        from tensortap.report.wording import clean

        typer.echo(clean(result.sentence), err=True)
    _write(result, outputs)
    _append_summary(result)
    sys.stdout.flush()  # a reader that has left must be noticed before the exit code is chosen
    raise typer.Exit(0 if exit_zero else EXIT_CODES[result.verdict])


# --- argv ----------------------------------------------------------------------------------------------------------
def steps_meant(text: str) -> dict[int, int]:
    """The reference's steps behind "3", "0,5", "10-20", "3:4" or "0-9:100-109", each with the candidate's."""
    from tensortap.errors import UsageError

    meant: dict[int, int] = {}
    for part in text.replace(" ", "").split(","):
        ours, _, theirs = part.partition(":")
        spans = [_span(side) for side in (ours, theirs or ours)]
        if spans[0] is None or spans[1] is None or part.endswith(":"):
            raise UsageError(f"--step {text}: {part or 'nothing'!r} is no step; say 3, 0,5, 10-20 or 3:4")
        if len(spans[0]) != len(spans[1]):
            raise UsageError(f"--step {text}: {part!r} has {len(spans[0])} steps against {len(spans[1])}")
        if len(meant) + len(spans[0]) > _MOST_STEPS:
            raise UsageError(f"--step {text}: more than {_MOST_STEPS:,} steps; leave the option out for all of them")
        meant |= dict(zip(spans[0], spans[1], strict=True))
    return meant


def _span(text: str) -> range | None:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or not (last if dash else first).isdecimal():
        return None
    span = range(int(first), int(last or first) + 1)
    return span or None


def _kinds(given: Sequence[str]) -> tuple[str, ...] | None:
    import difflib

    from tensortap.errors import UsageError
    from tensortap.records import KINDS

    for word in given:
        if word not in KINDS:
            close = difflib.get_close_matches(word, KINDS, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"--kind {word}: {hint}known are {', '.join(KINDS)}")
    return tuple(given) or None


def _tolerance(option: str, given: float | None) -> float | None:
    from tensortap.errors import UsageError

    if given is not None and not 0 <= given < float("inf"):
        raise UsageError(f"{option} {given}: say zero or more")
    return given


def _workers(given: int | None) -> int | None:
    from tensortap.errors import UsageError

    if given is not None and given < 1:
        raise UsageError(f"--workers {given}: it takes at least one")
    return given


def _outputs(given: Mapping[str, str | None]) -> dict[str, str]:
    """Where each report goes. A folder that is not there is noticed now, not after the comparison."""
    from tensortap.errors import UsageError
    from tensortap.report import output

    wanted = {name: path for name, path in given.items() if path is not None}
    for name, path in wanted.items():
        other = next(first for first, its_path in wanted.items() if its_path == path)
        if other != name:
            where = "stdout" if path == output.STDOUT else path
            raise UsageError(f"--{other} and --{name} cannot both go to {where}")
        output.check(path)
    if wanted.get("parquet") == output.STDOUT and sys.stdout.isatty():
        raise UsageError("--parquet -: it is not text; send it to a file or a pipe")
    return wanted


# --- what comes out ------------------------------------------------------------------------------------------------
def _print_page(result: Comparison, verbose: int) -> None:
    from tensortap.cli import screen
    from tensortap.report import comparison_page

    screen.print_lines(comparison_page.render(comparison_page.build(result, verbose), screen.width()))


def _write(result: Comparison, outputs: Mapping[str, str]) -> None:
    """All of them, even if one fails: what took hours to compare should not be lost to a full disk elsewhere."""
    from importlib import import_module

    from tensortap.errors import StoreWriteError
    from tensortap.report import output

    failed: StoreWriteError | None = None
    for name, path in outputs.items():
        report: Any = import_module(f"tensortap.report.comparison_{name}")
        try:
            with output.opened(path) as file:
                report.write(result, file)
        except StoreWriteError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _append_summary(result: Comparison) -> None:
    """To the summary of a GitHub step. It is a courtesy: that it fails must not change what the comparison says."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    from tensortap.report import comparison_markdown, output

    try:
        with open(path, "ab") as file:  # noqa: PTH123 - a path from the environment, taken as it is
            file.writelines(output.encoded([comparison_markdown.text(result, comparison_markdown.LIMIT - file.tell())]))
    except OSError as error:
        typer.echo(f"tensortap: GITHUB_STEP_SUMMARY could not be written: {error.strerror}", err=True)


@contextmanager
def _bar(wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """How far it is, after two seconds and if somebody may be watching: bytes a second, and the time left."""
    from tensortap.cli import screen

    console = screen.console(stderr=True)
    if not wanted or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("comparing"), BarColumn(32), TextColumn("{task.percentage:>3.0f}%"))
    progress = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True)
    task = progress.add_task("comparing", total=None)
    timer = threading.Timer(_PATIENCE, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: progress.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()  # it may be starting the line at this very moment
        progress.stop()

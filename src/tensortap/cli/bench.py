"""`tensortap bench`: measure the cost of a tap on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["bench"]


def bench(
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, or auto: cuda if available.")] = "auto",
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="llama-0.95b (default on cuda), llama-small (on a CPU) or llama-tiny."),
    ] = None,
    keep: Annotated[str, typer.Option(metavar="WHAT", help="summary, tensors, or both.")] = "summary,tensors",
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds; each runs every variant once.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for temporary runs.  [default: a temporary folder]"),
    ] = None,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="All figures; - for stdout.")] = None,
) -> None:
    """Measure what a tap costs on this machine, and what limits it.

    Trains a standard model with and without a tap, in turns, for some minutes. Leaves nothing on disk. While it runs,
    the tensors of one step of llama-0.95b take about 25 GB of disk, and up to 75 GB if there is room.

    \b
    Example:
      tensortap bench
      tensortap bench --device cpu --keep summary
      tensortap bench --out /data/scratch --json bench.json
    """
    from tensortap.bench import BenchOptions, measure
    from tensortap.cli import screen
    from tensortap.report.files import output
    from tensortap.report.terminal.bench import bench_page

    if json is not None:
        output.check(json)
    words = tuple(word.strip() for word in keep.split(",") if word.strip())
    options = BenchOptions(device=device, model=model, keep=words, rounds=rounds, out=out)
    with _bar() as on_progress:
        facts = measure(options, on_progress)
    if json != output.STDOUT:
        screen.print_lines(bench_page(facts, screen.width()))
    if json is not None:
        _write_json(facts, json)


def _write_json(facts: dict[str, object], path: str) -> None:
    import json

    from tensortap.report.files import output
    from tensortap.report.plain import plain

    with output.opened(path) as file:
        file.write(json.dumps(plain(facts), indent=2).encode() + b"\n")


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar with the current activity, if stderr is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from tensortap.cli import screen

    console = screen.console(stderr=True)
    columns = (BarColumn(32), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("loading torch", total=1.0)
        yield lambda doing, share: progress.update(task, description=doing, completed=share)

"""`tensortap export`: write the tensors of a run in common file formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

__all__ = ["export"]


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run, a dump, an .npz or a checkpoint; a path or URL.", show_default=False
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hdf5, npy, npz or safetensors.")],
    out: Annotated[str, typer.Option("--out", metavar="PATH", help="File to write; for npy and safetensors a folder.")],
    module: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help='Only matching modules; "(root)" is the model.')
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(metavar="KIND", help="Only input, output, grad_output, ...")] = None,
    step: Annotated[str, typer.Option(metavar="STEPS", help="Only these: 3 or 0,5 or 10-20 or last.")] = "",
    rank: Annotated[list[int] | None, typer.Option(metavar="N", help="Only these ranks.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
) -> None:
    """Write the tensors of a run as hdf5, npy, npz or safetensors.

    A format without bfloat16 or fp8 gets float32, which holds their values exactly. Records whose bytes were not kept
    are skipped and counted.

    \b
    Example:
      tensortap export runs/a --to npz --out a.npz --kind output --step last
      tensortap export runs/a --to safetensors --out weights --kind param --step 0
      tensortap export s3://bucket/runs/a --to npz --out s3://bucket/a.npz --step last
    """
    import tensortap
    from tensortap.cli import gather, screen
    from tensortap.errors import UsageError
    from tensortap.report.wording import clean, nbytes
    from tensortap.store.exports.export import FORMATS
    from tensortap.store.exports.export import export as write

    if to not in FORMATS:
        raise UsageError(f"--to {to}: use one of {', '.join(FORMATS)}")
    choice = gather.Choice(module or (), kind or (), (), step, rank or ())
    with screen.waiting(f"reading {run}"):
        opened = tensortap.open(run)
        chosen = gather.choose(opened, choice)
    with opened:
        if not len(chosen):
            hint = gather.suggestion(opened, choice.modules) or f"`tensortap show {run}` lists them"
            raise UsageError(f"no record of {run} matches the filters: {hint}")
        with _bar(f"writing {out}") as progress:
            done = write(
                opened,
                to,
                out,
                ranks=rank or None,
                filters=choice.filters(opened),
                overwrite=overwrite,
                progress=progress,
            )
    beside = f", listed in {done.manifest}" if done.manifest is not None else ""
    typer.echo(clean(f"{done.tensors} tensors, {nbytes(done.nbytes)}: {done.path}{beside}"))
    if done.skipped:
        typer.echo(clean(f"{done.skipped} records skipped: only their summaries were kept"))


@contextmanager
def _bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from tensortap.cli import screen

    console = screen.console(stderr=True)
    columns = (TextColumn("  {task.description}"), BarColumn(32), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)

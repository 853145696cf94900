"""`tensortap check-hooks`: compare the statistics of two trees of saved tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["check_hooks"]


def check_hooks(
    path_a: Annotated[
        Path, typer.Argument(metavar="A", help="The reference; results are written into it.", show_default=False)
    ],
    path_b: Annotated[Path, typer.Argument(metavar="B", help="The candidate.", show_default=False)],
    plot: Annotated[
        str | None, typer.Option(metavar="COLUMN", help='Draw a column, like "cosine similarity", on the terminal.')
    ] = None,
    plot_out: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="With --plot: also draw it as a picture.")
    ] = None,
    plot_over: Annotated[
        str,
        typer.Option(
            metavar="layers|steps", help="With --plot: the horizontal axis. `steps` draws one line for each layer."
        ),
    ] = "layers",
) -> None:
    """Compare two trees of tensors saved by register_saving_hook.

    Writes cosine similarity, mean, std and variance of all common files into one table for each rank, in
    A/tensors/compare_rst and A/grads/compare_rst. If a call on one side alone shifts the numbers in file names, files
    are paired by layer and micro step. The last line is the verdict of `tensortap compare A B`. Exit codes: 0 the trees
    match, 1 they diverge, 2 something cannot be read or written, 3 too little in common.

    \b
    Example:
      tensortap check-hooks tmp_tensors tmp_tensors_0
      tensortap check-hooks tmp_tensors tmp_tensors_0 --plot cosine --plot-out cosine.png
      tensortap check-hooks tmp_tensors tmp_tensors_0 --plot cosine --plot-over steps
    """
    from tensortap.compat import hook_result_checker

    raise typer.Exit(hook_result_checker.run(path_a, path_b, plot, plot_out, plot_over))

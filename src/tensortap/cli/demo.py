"""`tensortap demo`: train a small model with a tap on it, and show the run."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo"]

DEFAULT = Path("runs/demo")
STEPS = 12
_NEXT = (
    ('show {run} --module "layers.0.*" --step 0', "one layer"),
    ("show {run} --kind param_grad --sort -l2", "the largest gradients"),
    ("show {run} --nonfinite", "every NaN and infinity"),
    ("show {run} --json", "all of it, for programs"),
)


def demo(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"Folder for the run.  [default: {DEFAULT}, or the next that is free]"),
    ] = None,
    keep: Annotated[str, typer.Option(metavar="WHAT", help="summary, or tensors to keep all bytes too.")] = "summary",
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps.")] = STEPS,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is there already.")] = False,
) -> None:
    """Train a small torch model on the CPU, tapped, and show what was seen. Takes a few seconds.

    \b
    Example:
      tensortap demo
      tensortap demo --out runs/tiny --keep tensors --overwrite
    """
    from tensortap.cli import screen
    from tensortap.cli.gather import Choice
    from tensortap.cli.show import print_page
    from tensortap.demo import trainer
    from tensortap.errors import RunExists, UsageError

    if keep not in ("summary", "tensors"):
        raise UsageError(f"--keep {keep}: known are summary, tensors")
    if steps < 1:
        raise UsageError(f"--steps {steps}: it takes at least one")
    run = out or (DEFAULT if overwrite else _free(DEFAULT))
    if (run / "run.json").exists() and not overwrite:
        raise RunExists(f"{run} has a run already: --overwrite replaces it, or choose another --out")
    with screen.waiting("loading torch"):
        train = trainer()
    typer.echo(f"Training a two-layer decoder on a few sentences, tapped into {run}\n")
    with screen.losses(steps) as on_step:
        train(run, steps=steps, keep=keep, overwrite=overwrite, on_step=on_step)
    typer.echo()
    print_page(run, Choice(), limit=12)
    commands = [f"tensortap {command.format(run=_quoted(run))}" for command, _ in _NEXT]
    longest = max(map(len, commands))
    typer.echo("\nNext:")
    for command, (_, why) in zip(commands, _NEXT, strict=True):
        typer.echo(f"  {command.ljust(longest)}  # {why}")


def _free(path: Path) -> Path:
    """The path itself, or the next of its kind that nothing stands at."""
    if not path.exists():
        return path
    return next(other for n in count(2) if not (other := path.with_name(f"{path.name}-{n}")).exists())


def _quoted(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))

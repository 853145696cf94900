"""`tensortap demo`: train a small model twice, once with a planted mistake, and find the layer that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tensortap.core.records import Comparison
    from tensortap.demo.mistakes import Mistake

__all__ = ["demo"]

DEFAULT = Path("runs/demo")
STEPS = {"summary": 32, "tensors": 8}  # all bytes of a step are 13 MB
MISTAKE = "norm-epsilon"
_OTHERS = {"none": "no mistake: the runs match", "random": "one of these; revealed after the verdict"}


def demo(
    mistake: Annotated[
        str, typer.Option(metavar="NAME", help="The mistake in the candidate: see --list; or random, or none.")
    ] = MISTAKE,
    list_: Annotated[bool, typer.Option("--list", help="Print all mistakes without training.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"Folder for both runs.  [default: {DEFAULT}, or the next free name]"),
    ] = None,
    keep: Annotated[str, typer.Option(metavar="WHAT", help="summary, or tensors to keep all bytes.")] = "summary",
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N", help=f"Training steps.  [default: {STEPS['summary']}, or {STEPS['tensors']} with tensors]"
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing runs.")] = False,
) -> None:
    """Plant a mistake in one layer of a small model, and find it.

    Trains a torch model twice on the CPU, once with the mistake; compares the runs; names the layer. Takes some
    seconds. The exit code is 0 although the runs diverge.

    \b
    Example:
      tensortap demo
      tensortap demo --mistake random
      tensortap demo --mistake gelu-tanh --out runs/gelu --keep tensors
    """
    from rich.text import Text

    import tensortap
    from tensortap.cli import screen
    from tensortap.demo import curves, trainer
    from tensortap.errors import UsageError
    from tensortap.report.files import output
    from tensortap.report.html import comparison as comparison_html
    from tensortap.report.terminal import comparison as comparison_page

    if list_:
        _print_list()
        return
    if keep not in STEPS:
        raise UsageError(f"--keep {keep}: use one of {', '.join(STEPS)}")
    steps = STEPS[keep] if steps is None else steps
    if steps < 1:
        raise UsageError(f"--steps {steps}: use 1 or more")
    planted = _find_mistake(mistake)
    reference, candidate = _paths(out, overwrite)
    with screen.waiting("loading torch"):
        train = trainer()
    _say(f"Training a four-layer decoder twice: same start, same data, every tensor tapped. {_announced(mistake)}")
    with _bars(steps) as bar:
        right = train(reference, steps=steps, keep=keep, overwrite=overwrite, on_step=bar("reference"))
        plant = None if planted is None else planted.plant
        wrong = train(candidate, steps=steps, keep=keep, overwrite=overwrite, on_step=bar("candidate"), plant=plant)
    screen.print_lines([Text(), *curves.draw(right, wrong, screen.width() or 80), Text()])
    _say(curves.apart(right, wrong))
    with screen.waiting("comparing"):
        result = tensortap.compare(reference, candidate, details=comparison_html.DETAILS)
    screen.print_lines([Text(), *comparison_page.render(comparison_page.build(result), screen.width()), Text()])
    _print_solution(planted, result)
    page = reference.parent / "report.html"
    with output.opened(page) as file:
        comparison_html.write(result, file)
    typer.echo(f"\nReport for a browser: {page}")
    _print_next(reference, candidate, result)


# --- argv ----------------------------------------------------------------------------------------------------------
def _find_mistake(name: str) -> Mistake | None:
    import difflib
    import secrets

    from tensortap.demo.mistakes import MISTAKES
    from tensortap.errors import UsageError

    if name == "none":
        return None
    if name == "random":
        return secrets.choice(list(MISTAKES.values()))  # leaves every generator that a run may use alone
    if name not in MISTAKES:
        close = [other for other in MISTAKES if name and name in other]
        close = close or difflib.get_close_matches(name, [*MISTAKES, *_OTHERS], 3, 0.5)
        hint = f"did you mean {' or '.join(close[:3])}? " if close else ""
        raise UsageError(f"--mistake {name}: no such mistake; {hint}--list prints them all")
    return MISTAKES[name]


def _paths(out: Path | None, overwrite: bool) -> tuple[Path, Path]:
    """Return the paths of the reference and the candidate."""
    from tensortap.errors import RunExists

    folder = out or (DEFAULT if overwrite else _free(DEFAULT))
    if (folder / "run.json").exists():
        raise RunExists(f"{folder} is a run itself: choose another --out for the two runs")
    paths = folder / "reference", folder / "candidate"
    for run in paths:
        if (run / "run.json").exists() and not overwrite:
            raise RunExists(f"{run} has a run already: --overwrite replaces it, or choose another --out")
    return paths


def _free(path: Path) -> Path:
    """Return the path if it is free, else the first free one with a number."""
    if not path.exists():
        return path
    return next(other for n in count(2) if not (other := path.with_name(f"{path.name}-{n}")).exists())


# --- output --------------------------------------------------------------------------------------------------------
def _say(text: str) -> None:
    from tensortap.cli import screen
    from tensortap.report.wording import wrap

    for line in wrap(text, screen.width()):
        typer.echo(line)


def _print_list() -> None:
    from tensortap.demo.mistakes import MISTAKES

    lines = {name: mistake.what for name, mistake in MISTAKES.items()} | _OTHERS
    longest = max(map(len, lines))
    for name, what in lines.items():
        typer.echo(f"{name.ljust(longest)}  {what}")


def _announced(name: str) -> str:
    if name == "none":
        return "Nothing is wrong with the candidate."
    return f"One layer of the candidate has a mistake: {'guess which' if name == 'random' else name}."


def _print_solution(planted: Mistake | None, result: Comparison) -> None:
    """Print what was planted, and whether the verdict names it."""
    from rich.text import Text

    from tensortap.cli import screen
    from tensortap.core.records import display_name
    from tensortap.report.wording import wrap

    named = None if result.first is None else result.first.module
    place = "nothing" if named is None else display_name(named)
    right = named == (None if planted is None else planted.where)
    if planted is None:
        said = "Nothing was planted, and nothing was found." if right else f"Nothing was planted in {place}."
    else:
        said = f"Planted: {planted.name} in {planted.where} ({planted.what}). "
        said += "The verdict names exactly this module." if right else f"The verdict names {place} instead."
    screen.print_lines([Text(line, "bold green" if right else "bold red") for line in wrap(said, screen.width())])


def _print_next(reference: Path, candidate: Path, result: Comparison) -> None:
    import json
    import shlex

    from tensortap.cli import screen

    module = "layers.0" if result.first is None else result.first.module
    runs = shlex.join([str(reference), str(candidate)])
    commands = {
        f"tensortap show {shlex.quote(str(candidate))} --module {shlex.quote(module)}": "the records of the module",
        f"tensortap compare {runs} -v": "more rows",
        f"tensortap compare {runs} --json demo.json": "for programs",
        f"tensortap view {runs}": "every tensor in the browser",
        "tensortap demo --mistake random": "another one",
    }
    longest = max(map(len, commands))
    room = screen.width()
    explained = room is None or longest + max(map(len, commands.values())) + 6 <= room
    typer.echo("\nNext:")
    for command, why in commands.items():
        typer.echo(f"  {command.ljust(longest)}  # {why}" if explained else f"  {command}")
    typer.echo("\nOr in Python:")
    typer.echo("  import tensortap")
    typer.echo(f"  result = tensortap.compare({', '.join(json.dumps(str(run)) for run in (reference, candidate))})")
    typer.echo("  print(result)  # and see result.first, result.births, result.table")


@contextmanager
def _bars(steps: int) -> Iterator[Callable[[str], Callable[[int, float], None]]]:
    """Show a progress bar for each run on a terminal. `bar(name)` returns a function that takes a step and its loss."""
    from rich.progress import BarColumn, Progress, TextColumn

    from tensortap.cli import screen

    console = screen.console(stderr=True)
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(32),
        TextColumn("{task.completed}/{task.total}  {task.fields[loss]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def bar(name: str) -> Callable[[int, float], None]:
            task = progress.add_task(name, total=steps, loss="")
            return lambda step, loss: progress.update(task, completed=step + 1, loss=f"loss {loss:.4f}")

        yield bar

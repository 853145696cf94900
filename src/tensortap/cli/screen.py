"""How the verbs speak: pages on stdout, and a sign of life on stderr when something takes long."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

__all__ = ["comparing", "console", "losses", "print_lines", "progress", "waiting", "width"]

_PLAIN_ABOVE = 500
_PATIENCE = 2.0


def console(stderr: bool = False) -> Console:
    """One that prints what it is given: no markup, no guessing at numbers or emoji."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def width() -> int | None:
    """Of the terminal, or COLUMNS. None if there is neither: what goes into a pipe is not cut."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told):
        return max(40, int(told))
    if not sys.stdout.isatty():
        return None
    return max(40, os.get_terminal_size(sys.stdout.fileno()).columns)


def print_lines(lines: Sequence[Text]) -> None:
    """Colour is for what fits on a few screens; beyond that it only costs time."""
    screen = console()
    if len(lines) > _PLAIN_ABOVE or not screen.color_system:
        sys.stdout.writelines(f"{line.plain}\n" for line in lines)
        return
    for line in lines:
        screen.print(line, soft_wrap=True)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Says what is going on if the block takes more than two seconds and somebody may be watching."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield
        return
    status = Status(text, console=screen, spinner="dots")
    timer = threading.Timer(_PATIENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be starting the line at this very moment
        status.stop()


def comparing(wanted: bool) -> AbstractContextManager[Callable[[int, int], None] | None]:
    """The progress of a comparison."""
    return progress("comparing", wanted)


@contextmanager
def progress(title: str, wanted: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function that takes bytes done and bytes in all, or None if nobody is watching.

    After two seconds it shows a bar on stderr, with bytes a second and the time left.
    """
    screen = console(stderr=True)
    if not wanted or not screen.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(32), TextColumn("{task.percentage:>3.0f}%"))
    bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=screen, transient=True)
    task = bar.add_task(Text(title).markup, total=None)
    timer = threading.Timer(_PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()  # it may be starting the line at this very moment
        bar.stop()


@contextmanager
def losses(steps: int) -> Iterator[Callable[[int, float], None]]:
    """Call it with each step and its loss: a line each, and below them, on a terminal, how far it is."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console()
    columns = (
        TextColumn("  training"),
        BarColumn(32),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    first = 0.0
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("training", total=steps)

        def on_step(step: int, loss: float) -> None:
            nonlocal first
            first = first or loss
            bar = "━" * max(1, round(32 * min(1.0, loss / first))) if loss > 0 else ""
            screen.print(Text.assemble(f"  step {step:<3} loss {loss:.4f}  ", (bar, "cyan")), soft_wrap=True)
            progress.advance(task)

        yield on_step

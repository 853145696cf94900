"""Terminal output of the verbs: pages on stdout, and progress on stderr when something takes long."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from rich.status import Status
from rich.text import Text

from tensortap.report.terminal.console import console

__all__ = ["comparing", "console", "print_lines", "progress", "waiting", "width"]

_PLAIN_ABOVE = 500
"""Lines of a page beyond which colour only costs time."""
_DELAY = 2.0
"""Seconds before progress is shown."""


def width() -> int | None:
    """Return the width of the terminal, or COLUMNS. Return None if there is neither: text in a pipe is not cut."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return max(40, int(given))
    if not sys.stdout.isatty():
        return None
    return max(40, os.get_terminal_size(sys.stdout.fileno()).columns)


def print_lines(lines: Sequence[Text]) -> None:
    """Print a page, in colour if it is short and the terminal has colours."""
    screen = console()
    if len(lines) > _PLAIN_ABOVE or not screen.color_system:
        sys.stdout.writelines(f"{line.plain}\n" for line in lines)
        return
    for line in lines:
        screen.print(line)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show `text` with a spinner on a terminal if the block takes more than two seconds."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield
        return
    status = Status(text, console=screen, spinner="dots")
    with _after_delay(status.start, status.stop):
        yield


def comparing(wanted: bool) -> AbstractContextManager[Callable[[int, int], None] | None]:
    """Show the progress of a comparison."""
    return progress("comparing", wanted)


@contextmanager
def progress(title: str, wanted: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function that takes the bytes done and the total, or None if stderr is not a terminal.

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
    with _after_delay(bar.start, bar.stop):
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _after_delay(start: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(_DELAY, start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be starting at this very moment
        stop()

"""Prints what one module sees in its first calls, keeps the values, and gathers them for a file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, Any

from rich.text import Text

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.selection import Keep
from tensortap.capture.tree import Site
from tensortap.core import dtypes
from tensortap.core.records import Key
from tensortap.frameworks.base import Framework
from tensortap.kernels import summarize
from tensortap.model.peek.file import Entries, free_path, write
from tensortap.model.peek.values import PeekedValues
from tensortap.report.terminal import peek as peek_lines
from tensortap.report.terminal.console import console

__all__ = ["PeekSink", "Screen"]


class Screen:
    """Where the lines go, and which module was spoken of last."""

    def __init__(self, file: IO[str] | None, quiet: bool = False) -> None:
        self.quiet = quiet
        self._file = file
        self._subject: object = None

    @property
    def width(self) -> int:
        return max(40, shutil.get_terminal_size((80, 24)).columns)

    def under(self, subject: object, heading: Callable[[], Text]) -> None:
        """Print the heading unless the last lines stood under the same one."""
        if subject != self._subject:
            self._subject = subject
            self.say([heading()])

    def say(self, lines: Sequence[Text]) -> None:
        if self.quiet:
            return
        screen = console(self._file or sys.stdout)
        for line in lines:
            screen.print(line, soft_wrap=True)


class PeekSink:
    """Takes what flows through one module in its first calls."""

    def __init__(
        self,
        framework: Framework,
        name: str,
        kinds: Collection[str],
        times: int,
        screen: Screen,
        values: PeekedValues,
        save: Path | None,
    ) -> None:
        self.where = "the terminal" if save is None else str(save)
        self.name = name
        self.calls = 0
        self._framework = framework
        self._kinds = kinds
        self._forward = bool({"input", "output"} & set(kinds))
        self._times = times
        self._screen = screen
        self._values = values
        self._save = save
        self._numbers: dict[tuple[int, int], int] = {}
        self._due: dict[int, set[tuple[str, str]]] = {}
        self._entries: dict[int, Entries] = {}
        self._cls = ""

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        number = self._number(key)
        if number is None:
            return
        array = self._framework.host(tensor)
        if not self._screen.quiet:
            self._print(array, type(tensor).__name__, number, key, site)
        self._values.add(self.name, number, key.kind, key.path, array)
        due = self._due.setdefault(number, set())
        if key.phase == "forward":
            if self._framework.requires_gradient(tensor):
                due.add((f"grad_{key.kind}", key.path))
        else:
            due.discard((key.kind, key.path))
        if self._save is not None:
            self._cls = site.cls
            self._entries.setdefault(number, Entries()).add(key.kind, key.path, array)

    def _print(self, array: Any, kind_of: str, number: int, key: Key, site: Site) -> None:
        width = self._screen.width
        self._screen.under(
            (self.name, number, key.phase),
            lambda: peek_lines.about_call(self.name, site.cls, number, self._times, key.phase, width),
        )
        name = dtypes.name_of(array.dtype)
        self._screen.say(
            peek_lines.about_tensor(f"{key.kind} {key.path}", kind_of, name, summarize(array), array, width)
        )

    def _number(self, key: Key) -> int | None:
        """Which call this is, from one; None once enough were seen. The module is its own root here, so that every
        call of it opens a micro step."""
        call = (key.micro, key.call)
        if call not in self._numbers:
            late = key.phase != "forward" and self._forward  # of a call that was not shown
            if late or self.calls >= self._times:
                return None
            self.write(self._kinds)  # what the earlier calls were waiting for has come, as a rule
            self.calls += 1
            self._numbers[call] = self.calls
        return self._numbers[call]

    @property
    def waiting(self) -> bool:
        """Whether a gradient of a call that is to be shown may still come."""
        if not self._forward and self.calls < self._times:
            return True
        return any(kind in self._kinds for due in self._due.values() for kind, _ in due)

    def write(self, wait_for: Collection[str] = ()) -> None:
        """Each call into a file of its own, in order, up to one that still waits for a gradient of these kinds."""
        for number in sorted(self._entries):
            if self._save is None or any(kind in wait_for for kind, _ in self._due[number]):
                return
            entries = self._entries.pop(number)
            write(free_path(self._save), entries, module=self.name, cls=self._cls, framework=self._framework.name)

    def end_step(self, step: int, book: CoverageBook) -> None:
        self.write()

    def close(self, status: str, reason: str, book: CoverageBook) -> None:
        self.write()

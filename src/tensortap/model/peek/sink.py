"""The sink of one peeked module: print its tensors, keep their values and write them to files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, Any

from rich.text import Text

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.tree import Site
from tensortap.capture.selection import Keep
from tensortap.core import dtypes
from tensortap.core.records import Key
from tensortap.frameworks.base import Framework
from tensortap.kernels import summarize
from tensortap.model.page_width import terminal_width
from tensortap.model.peek.call_file import CallArrays, free_path, write_call
from tensortap.model.peek.values import PeekedValues
from tensortap.report.terminal import peek as peek_lines
from tensortap.report.terminal.console import console

__all__ = ["PeekPrinter", "PeekSink"]


class PeekPrinter:
    """Prints lines under a heading, and repeats the heading only when it changes."""

    def __init__(self, file: IO[str] | None, quiet: bool = False) -> None:
        self.quiet = quiet
        self._file = file
        self._subject: object = None

    @property
    def width(self) -> int:
        return terminal_width(least=40)

    def print_heading(self, subject: object, heading: Callable[[], Text]) -> None:
        """Print a heading, unless the last lines are under the same one."""
        if subject != self._subject:
            self._subject = subject
            self.print_lines([heading()])

    def print_lines(self, lines: Sequence[Text]) -> None:
        if self.quiet:
            return
        screen = console(self._file or sys.stdout)
        for line in lines:
            screen.print(line, soft_wrap=True)


class PeekSink:
    """Receives the tensors of one module's first calls."""

    def __init__(
        self,
        framework: Framework,
        name: str,
        kinds: Collection[str],
        times: int,
        printer: PeekPrinter,
        values: PeekedValues,
        save: Path | None,
    ) -> None:
        self.where = "the terminal" if save is None else str(save)
        self.name = name
        self.calls = 0
        self._framework = framework
        self._kinds = kinds
        self._sees_forward = bool({"input", "output"} & set(kinds))
        self._times = times
        self._printer = printer
        self._values = values
        self._save = save
        self._numbers: dict[tuple[int, int], int] = {}
        self._awaited: dict[int, set[tuple[str, str]]] = {}
        self._arrays: dict[int, CallArrays] = {}
        self._cls = ""

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        number = self._call_number(key)
        if number is None:
            return
        array = self._framework.host(tensor)
        if not self._printer.quiet:
            self._print(array, type(tensor).__name__, number, key, site)
        self._values.add(self.name, number, key.kind, key.path, array)
        awaited = self._awaited.setdefault(number, set())
        if key.phase == "forward":
            if self._framework.requires_gradient(tensor):
                awaited.add((f"grad_{key.kind}", key.path))
        else:
            awaited.discard((key.kind, key.path))
        if self._save is not None:
            self._cls = site.cls
            self._arrays.setdefault(number, CallArrays()).add(key.kind, key.path, array)

    def _print(self, array: Any, kind_of: str, number: int, key: Key, site: Site) -> None:
        width = self._printer.width
        self._printer.print_heading(
            (self.name, number, key.phase),
            lambda: peek_lines.about_call(self.name, site.cls, number, self._times, key.phase, width),
        )
        name = dtypes.name_of(array.dtype)
        self._printer.print_lines(
            peek_lines.about_tensor(f"{key.kind} {key.path}", kind_of, name, summarize(array), array, width)
        )

    def _call_number(self, key: Key) -> int | None:
        """Return the number of this call, from 1; None once enough calls were seen.

        The module is the root of its own observer, so each call of it begins a micro step.
        """
        call = (key.micro, key.call)
        if call not in self._numbers:
            late = key.phase != "forward" and self._sees_forward  # a gradient of a call that was not shown
            if late or self.calls >= self._times:
                return None
            self.write(self._kinds)  # the gradients of earlier calls have usually arrived by now
            self.calls += 1
            self._numbers[call] = self.calls
        return self._numbers[call]

    @property
    def awaits_gradient(self) -> bool:
        """Whether a gradient of a shown call may still arrive."""
        if not self._sees_forward and self.calls < self._times:
            return True
        return any(kind in self._kinds for awaited in self._awaited.values() for kind, _ in awaited)

    def write(self, kinds_awaited: Collection[str] = ()) -> None:
        """Write each call to its own file, in order; stop at one that awaits a gradient of these kinds."""
        for number in sorted(self._arrays):
            if self._save is None or any(kind in kinds_awaited for kind, _ in self._awaited[number]):
                return
            arrays = self._arrays.pop(number)
            write_call(free_path(self._save), arrays, module=self.name, cls=self._cls, framework=self._framework.name)

    def end_step(self, step: int, book: CoverageBook) -> None:
        self.write()

    def close(self, status: str, reason: str, book: CoverageBook) -> None:
        self.write()

"""What a peek puts on a model: an observer for each chosen module, each gone once it has seen enough."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from tensortap import dtypes
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.observer import Observer
from tensortap.capture.selection import Keep, Selection
from tensortap.capture.tree import Site, Tree
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of
from tensortap.frameworks.base import Framework
from tensortap.frameworks.loading import Wrap
from tensortap.kernels import summarize
from tensortap.model.peek import KINDS
from tensortap.model.peek_file import Entries, free_path, write
from tensortap.records import Key
from tensortap.report import output, peek_lines

__all__ = ["Peek", "PeekSink"]

_PATIENCE = 8
"""Forwards of the model after which a gradient that has not come is not waited for: its output was not used."""


class Screen:
    """Where the lines go, and which module was spoken of last."""

    def __init__(self, file: IO[str] | None) -> None:
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
        console = Console(file=self._file or sys.stdout, markup=False, highlight=False, emoji=False)
        for line in lines:
            console.print(line, soft_wrap=True)


class PeekSink:
    """Prints, and gathers for the file, what one module sees in its first calls."""

    def __init__(
        self,
        framework: Framework,
        name: str,
        kinds: Collection[str],
        times: int,
        screen: Screen,
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
        heading = (self.name, number, key.phase)
        width = self._screen.width
        self._screen.under(
            heading, lambda: peek_lines.about_call(self.name, site.cls, number, self._times, key.phase, width)
        )
        label, kind_of = f"{key.kind} {key.path}", type(tensor).__name__
        self._screen.say(
            peek_lines.about_tensor(label, kind_of, dtypes.name_of(array.dtype), summarize(array), array, width)
        )
        due = self._due.setdefault(number, set())
        if key.phase == "forward":
            if self._framework.requires_gradient(tensor):
                due.add((f"grad_{key.kind}", key.path))
        else:
            due.discard((key.kind, key.path))
        if self._save is not None:
            self._cls = site.cls
            self._entries.setdefault(number, Entries()).add(key.kind, key.path, array)

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


class _Watch:
    """One module under observation: an observer that has this module for its root, so that it can go by itself."""

    def __init__(self, site: Site, sink: PeekSink, kinds: Collection[str]) -> None:
        self.sink = sink
        self.patience = _PATIENCE
        # A peek must never end a training run: what goes wrong is a warning.
        self._observer = Observer(site.module, Selection(kinds=kinds, modules="(root)"), lambda: sink, on_error="warn")

    def calls(self) -> int:
        """How often the module has run, shown or not."""
        return self._observer.coverage[0].calls

    def close(self) -> str:
        """Take the hooks off; a remark if something was not there to be seen."""
        self._observer.close()
        row = self._observer.coverage[0]
        if row.status == "never called":
            return "never ran: unused, called through .forward(), or its parent reads its weights directly"
        return f"{row.status}: {row.reason}" if row.status == "no gradient" else row.reason


class Peek:
    """What `tensortap.peek` returns: a handle with `close()`, and a context manager."""

    def __init__(
        self,
        model: Any,
        modules: str | Sequence[str] | Callable[[str, Any], bool],
        kinds: Collection[str],
        times: int,
        rank: int | None,
        save: str | Path | None,
        file: IO[str] | None,
    ) -> None:
        framework = framework_of(model)
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise UsageError(f"kinds: {unknown[0]!r} does not flow through a module; there are {', '.join(KINDS)}")
        if not isinstance(times, int) or times < 1:
            raise UsageError(f"times: {times!r} is not a number of calls, 1 or more")
        tree = Tree(framework, model)
        sites = _chosen(tree, Selection(kinds=kinds, modules=modules))
        if save is not None:
            output.check(free_path(save))
        self._framework, self._times = framework, times
        self._screen = Screen(file)
        self._watches: list[_Watch] = []
        self._undo = ExitStack()
        here = framework.rank()
        if rank is not None and here != rank:
            return
        with ExitStack() as undo:  # a failure half-way takes back what was placed
            undo.callback(self._drop)
            for site in sites:
                if site.inside is not None:
                    self._remark(site.name, f"runs inside the compiled graph of {site.inside or '(root)'}: not seen")
                    continue
                if not site.callable:
                    continue
                path = None if save is None else _path_of(Path(save), site.name if len(sites) > 1 else None, here)
                sink = PeekSink(framework, site.name, kinds, times, self._screen, path)
                self._watches.append(_Watch(site, sink, kinds))
            root = tree.sites[0]
            if self._watches and not framework.compiled(root.module):
                # Inside the root's forward no list of hooks is being walked: the one place where they may go.
                undo.callback(Wrap(root.module, "forward", self._between).remove)
            self._undo = undo.pop_all()

    @property
    def done(self) -> bool:
        """Whether every chosen module has been seen often enough, and nothing of the peek is on the model any more."""
        return not self._watches

    def close(self) -> None:
        """Take everything off and say what could not be seen. Calling it twice does no harm."""
        self._undo.close()

    def __enter__(self) -> Peek:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _between(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Another forward begins: modules that have been seen often enough are left alone from now on."""
        if not self._framework.replaying():
            for watch in list(self._watches):
                if watch.calls() < self._times:
                    continue
                watch.patience -= 1
                # The root's own call has begun already: the last one to be shown may be this very one.
                begun = not watch.sink.name and watch.patience == _PATIENCE - 1
                if not begun and (not watch.sink.waiting or not watch.patience):
                    self._finish(watch)
            if not self._watches:
                self._undo.close()
        return forward(*args, **kwargs)

    def _finish(self, watch: _Watch) -> None:
        self._watches.remove(watch)
        if remark := watch.close():
            self._remark(watch.sink.name, remark)

    def _drop(self) -> None:
        for watch in list(self._watches):
            self._finish(watch)

    def _remark(self, name: str, text: str) -> None:
        self._screen.say(peek_lines.remark(name, text, self._screen.width))


def _chosen(tree: Tree, selection: Selection) -> list[Site]:
    """A shared module may be asked for by any of its names."""
    names = {site.name for site in tree.sites if selection.wants_module(site.name, site.cls, site.owner)}
    owners = {site.name: site.owner for site in tree.sites}
    names |= {a.first for a in tree.aliases if selection.wants_module(a.name, a.cls, owners[a.first])}
    every = [site.name for site in tree.sites] + [alias.name for alias in tree.aliases]
    selection.check_found(len(names), every, {site.cls for site in tree.sites})
    chosen = [site for site in tree.sites if site.name in names]
    if not any(site.callable for site in chosen):
        raise UsageError(f"{chosen[0].name} only holds other modules and computes nothing: peek at {chosen[0].name}.*")
    return chosen


def _path_of(path: Path, module: str | None, rank: int) -> Path:
    stem = path.name.removesuffix(".npz")
    if module is not None:
        stem += "." + re.sub(r"[^A-Za-z0-9_.-]", "_", module or "(root)")
    return path.with_name(f"{stem}.rank{rank}.npz" if rank else f"{stem}.npz")

"""The handle of a peek: one observer for each chosen module, removed once it has seen enough calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tensortap.capture.modules.tree import Site, Tree
from tensortap.capture.observer import Observer
from tensortap.capture.selection import Selection
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.loading import Wrap
from tensortap.model.peek import KINDS
from tensortap.model.peek.call_file import free_path
from tensortap.model.peek.calls import PeekedModule
from tensortap.model.peek.histogram import BINS, ValueHistogram
from tensortap.model.peek.sink import PeekPrinter, PeekSink
from tensortap.model.peek.values import PeekedValues
from tensortap.report.files import output
from tensortap.report.terminal import peek as peek_lines
from tensortap.report.wording import nbytes, plural
from tensortap.store.formats.npy.names import file_name

__all__ = ["Peek", "PeekOptions"]

_MOST_SHOWN = 8
"""Upper bound on the modules that the handle's repr describes."""
_MAX_FORWARDS_WAITED = 8
"""Forwards of the model to wait for a gradient; after them, the module's output counts as unused."""


@dataclass(frozen=True)
class PeekOptions:
    """Options of a peek; `tensortap.peek` documents them."""

    kinds: tuple[str, ...]
    times: int
    rank: int | None
    save: str | Path | None
    file: IO[str] | None
    quiet: bool
    max_memory: int

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise UsageError(f"kinds: {unknown[0]!r} does not flow through a module; choose from {', '.join(KINDS)}")
        if not isinstance(self.times, int) or self.times < 1:
            raise UsageError(f"times: {self.times!r} is not a number of calls: give an integer, 1 or more")
        if not isinstance(self.max_memory, int) or self.max_memory < 0:
            raise UsageError(f"max_memory: {self.max_memory!r} is not a number of bytes: give an integer, 0 or more")


class _WatchedModule:
    """An observer whose root is one peeked module, so that it can be removed separately."""

    def __init__(self, site: Site, sink: PeekSink, kinds: Collection[str]) -> None:
        self.sink = sink
        self.forwards_left = _MAX_FORWARDS_WAITED
        # A peek must never stop the training, so errors become warnings.
        self._observer = Observer(site.module, Selection(kinds=kinds, modules="(root)"), lambda: sink, on_error="warn")

    def calls(self) -> int:
        """Return the number of calls of the module, shown or not."""
        return self._observer.coverage[0].calls

    def close(self) -> str:
        """Remove the hooks; return a remark if something could not be seen."""
        self._observer.close()
        row = self._observer.coverage[0]
        if row.status == "never called":
            return "never ran: unused, called through .forward(), or its parent reads its weights directly"
        return f"{row.status}: {row.reason}" if row.status == "no gradient" else row.reason


class Peek:
    """The handle that `tensortap.peek` returns: the values by module. Use it as a context manager or call `close()`.

    >>> p["conv2"].output, p["conv2"].grad_input                               # doctest: +SKIP
    >>> p["conv2"].calls[0].input["mask"]                                      # doctest: +SKIP
    >>> counts, edges = p.histogram("conv2", "output")                         # doctest: +SKIP
    """

    def __init__(
        self, model: Any, modules: str | Sequence[str] | Callable[[str, Any], bool], options: PeekOptions
    ) -> None:
        model = network_of(model)
        framework = framework_of(model)
        tree = Tree(framework, model)
        sites, unmatched = _select_sites(tree, Selection(kinds=options.kinds, modules=modules))
        save = options.save
        if save is not None:
            output.check(free_path(save))
        self._framework, self._times = framework, options.times
        self._printer = PeekPrinter(options.file, options.quiet)
        self._values = PeekedValues(tree, options.kinds, options.max_memory)
        self.notices: list[str] = []
        """For each module with missing values, the reason. Also printed, unless quiet."""
        self._watched: list[_WatchedModule] = []
        self._undo = ExitStack()
        here = framework.rank()
        if options.rank is not None and here != options.rank:
            self._values.why_not_here = (
                f"this is rank {here}, and the peek is on rank {options.rank} only: give rank=None to peek on all ranks"
            )
            return
        for text in unmatched:
            self.notices.append(text)
            self._printer.print_lines(peek_lines.notice(text, self._printer.width))
        with ExitStack() as undo:  # a failure removes the hooks placed so far
            undo.callback(self._finish_all)
            for site in sites:
                if not site.callable and site.inside is None:
                    continue
                self._values.add_module(site.name, site.cls)
                if site.inside is not None:
                    self._add_remark(
                        site.name, f"runs inside the compiled graph of {site.inside or '(root)'}: not seen"
                    )
                    continue
                path = None if save is None else _save_path(Path(save), site.name if len(sites) > 1 else None, here)
                sink = PeekSink(framework, site.name, options.kinds, options.times, self._printer, self._values, path)
                self._watched.append(_WatchedModule(site, sink, options.kinds))
            root = tree.sites[0]
            if self._watched and not framework.compiled(root.module):
                # Inside the root's forward, no list of hooks is being iterated, so hooks may be removed there.
                undo.callback(Wrap(root.module, "forward", self._on_root_forward).remove)
            self._undo = undo.pop_all()

    @property
    def done(self) -> bool:
        """Whether every chosen module has been seen often enough, and all hooks are removed."""
        return not self._watched

    def close(self) -> None:
        """Remove all hooks and print what could not be seen. The values stay available. Idempotent."""
        self._undo.close()

    def __getitem__(self, module: str) -> PeekedModule:
        """Return the values of a module by its name; the model itself is "(root)"."""
        return self._values[module]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the peeked modules."""
        return map(display_name, self._values.modules)

    def __contains__(self, module: object) -> bool:
        return module in self._values

    def histogram(
        self, module: str, kind: str = "output", *, path: str | None = None, call: int = -1, bins: int = BINS
    ) -> ValueHistogram:
        """Return the histogram of a tensor; see `PeekedModule.histogram`.

        >>> counts, edges = p.histogram("conv2", "output")                     # doctest: +SKIP
        """
        return self._values[module].histogram(kind, path=path, call=call, bins=bins)

    def __repr__(self) -> str:
        values = self._values
        head = f"Peek at {plural(len(values.modules), 'module')}, {'done' if self.done else 'on the model'}"
        dropped = "; older values were dropped" if values.dropped else ""
        described = [repr(module).splitlines() for module in list(values.modules.values())[:_MOST_SHOWN]]
        lines = [f"  {line}" for each in described for line in each]
        more = len(values.modules) - _MOST_SHOWN
        lines += [f"  and {plural(more, 'more module')}"] if more > 0 else []
        return "\n".join([f"{head}; {nbytes(values.nbytes)} of values{dropped}", *lines])

    def __enter__(self) -> Peek:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_root_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Remove the hooks of modules that have been seen often enough, then run the root's forward."""
        if not self._framework.recomputing():
            for watched in list(self._watched):
                if watched.calls() < self._times:
                    continue
                watched.forwards_left -= 1
                # The root's own call has already begun: this may be the last one to show.
                begun = not watched.sink.name and watched.forwards_left == _MAX_FORWARDS_WAITED - 1
                if not begun and (not watched.sink.awaits_gradient or not watched.forwards_left):
                    self._finish(watched)
            if not self._watched:
                self._undo.close()
        return forward(*args, **kwargs)

    def _finish(self, watched: _WatchedModule) -> None:
        self._watched.remove(watched)
        if remark := watched.close():
            self._add_remark(watched.sink.name, remark)

    def _finish_all(self) -> None:
        for watched in list(self._watched):
            self._finish(watched)

    def _add_remark(self, name: str, text: str) -> None:
        self._values.modules[name].remark = text
        self.notices.append(f"{display_name(name)}: {text}")
        self._printer.print_lines(peek_lines.remark(name, text, self._printer.width))


def _select_sites(tree: Tree, selection: Selection) -> tuple[list[Site], list[str]]:
    """Return the selected modules, and a notice for each pattern that matches none.

    A shared module may be selected by any of its names.
    """
    names = {site.name for site in tree.sites if selection.wants_module(site.name, site.cls, site.owner)}
    owners = {site.name: site.owner for site in tree.sites}
    names |= {a.first for a in tree.aliases if selection.wants_module(a.name, a.cls, owners[a.first])}
    every = [site.name for site in tree.sites] + [alias.name for alias in tree.aliases]
    unmatched = selection.check_found(len(names), every, {site.cls for site in tree.sites})
    chosen = [site for site in tree.sites if site.name in names]
    if not any(site.callable for site in chosen):
        raise UsageError(f"{chosen[0].name} only holds other modules and computes nothing: peek at {chosen[0].name}.*")
    return chosen, unmatched


def _save_path(path: Path, module: str | None, rank: int) -> Path:
    stem, end = path.name.removesuffix(".npz"), f".rank{rank}.npz" if rank else ".npz"
    return path.with_name(f"{stem}{end}" if module is None else file_name(f"{stem}.", module, end))

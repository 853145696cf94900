"""What a peek puts on a model: an observer for each chosen module, each gone once it has seen enough."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tensortap.capture.observer import Observer
from tensortap.capture.selection import Selection
from tensortap.capture.tree import Site, Tree
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.loading import Wrap
from tensortap.model.peek import DEFAULT_MEMORY, KINDS
from tensortap.model.peek.calls import PeekedModule
from tensortap.model.peek.file import free_path
from tensortap.model.peek.histogram import BINS, ValueHistogram
from tensortap.model.peek.sink import PeekSink, Screen
from tensortap.model.peek.values import PeekedValues
from tensortap.report.files import output
from tensortap.report.terminal import peek as peek_lines
from tensortap.report.wording import nbytes, plural

__all__ = ["Peek"]

_MOST_SHOWN = 8
"""Modules that the handle's own text describes."""
_PATIENCE = 8
"""Forwards of the model after which a gradient that has not come is not waited for: its output was not used."""


class _Watch:
    """One module under observation: an observer that has this module for its root, so that it can go by itself."""

    def __init__(self, site: Site, sink: PeekSink, kinds: Collection[str]) -> None:
        self.sink = sink
        self.bound = _PATIENCE
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
    """What `tensortap.peek` returns: a handle with `close()`, a context manager, and the values by module.

    >>> p["conv2"].output, p["conv2"].grad_input                               # doctest: +SKIP
    >>> p["conv2"].calls[0].input["mask"]                                      # doctest: +SKIP
    >>> counts, edges = p.histogram("conv2", "output")                         # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        modules: str | Sequence[str] | Callable[[str, Any], bool],
        kinds: Collection[str],
        times: int,
        rank: int | None,
        save: str | Path | None,
        file: IO[str] | None,
        quiet: bool = False,
        max_memory: int = DEFAULT_MEMORY,
    ) -> None:
        model = network_of(model)
        framework = framework_of(model)
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise UsageError(f"kinds: {unknown[0]!r} does not flow through a module; there are {', '.join(KINDS)}")
        if not isinstance(times, int) or times < 1:
            raise UsageError(f"times: {times!r} is not a number of calls, 1 or more")
        if not isinstance(max_memory, int) or max_memory < 0:
            raise UsageError(f"max_memory: {max_memory!r} is not a number of bytes, 0 or more")
        tree = Tree(framework, model)
        sites = _chosen(tree, Selection(kinds=kinds, modules=modules))
        if save is not None:
            output.check(free_path(save))
        self._framework, self._times = framework, times
        self._screen = Screen(file, quiet)
        self._values = PeekedValues(tree, kinds, max_memory)
        self.notices: list[str] = []
        """What could not be seen of which module, and why. Also printed, unless quiet."""
        self._watches: list[_Watch] = []
        self._undo = ExitStack()
        here = framework.rank()
        if rank is not None and here != rank:
            self._values.elsewhere = f"this is rank {here}, and the peek is on rank {rank}; rank=None is on all of them"
            return
        with ExitStack() as undo:  # a failure half-way takes back what was placed
            undo.callback(self._drop)
            for site in sites:
                if not site.callable and site.inside is None:
                    continue
                self._values.watch(site.name, site.cls)
                if site.inside is not None:
                    self._remark(site.name, f"runs inside the compiled graph of {site.inside or '(root)'}: not seen")
                    continue
                path = None if save is None else _path_of(Path(save), site.name if len(sites) > 1 else None, here)
                sink = PeekSink(framework, site.name, kinds, times, self._screen, self._values, path)
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
        """Take everything off and say what could not be seen. The values stay. Calling it twice does no harm."""
        self._undo.close()

    def __getitem__(self, module: str) -> PeekedModule:
        """The values of a module, by its name; the model itself is "(root)"."""
        return self._values[module]

    def __iter__(self) -> Iterator[str]:
        """The names of the modules that it looks at."""
        return map(display_name, self._values.modules)

    def __contains__(self, module: object) -> bool:
        return module in self._values

    def histogram(
        self, module: str, kind: str = "output", *, path: str | None = None, call: int = -1, bins: int = BINS
    ) -> ValueHistogram:
        """Count the values of a tensor in bins; see `PeekedModule.histogram`.

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

    def _between(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Another forward begins: modules that have been seen often enough are left alone from now on."""
        if not self._framework.recomputing():
            for watch in list(self._watches):
                if watch.calls() < self._times:
                    continue
                watch.bound -= 1
                # The root's own call has begun already: the last one to be shown may be this very one.
                begun = not watch.sink.name and watch.bound == _PATIENCE - 1
                if not begun and (not watch.sink.waiting or not watch.bound):
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
        self._values.modules[name].remark = text
        self.notices.append(f"{display_name(name)}: {text}")
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

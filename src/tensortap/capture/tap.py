"""The tap: opens a run, keeps the hooks in place from step to step, and takes everything back at the end."""

from __future__ import annotations

import atexit
import platform
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tensortap import kernels
from tensortap.capture.clock import Clock
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.recorder import Recorder
from tensortap.capture.selection import Selection
from tensortap.capture.tree import Site, Tree
from tensortap.capture.watcher import Watcher
from tensortap.errors import CaptureError, TensortapError, UsageError
from tensortap.frameworks import Framework, framework_of
from tensortap.machine import cores
from tensortap.records import Coverage
from tensortap.store.writer import RunWriter

__all__ = ["Options", "Tap"]


@dataclass(frozen=True)
class Options:
    """How the tap behaves, as against what it selects."""

    overwrite: bool = False
    on_error: str = "raise"
    compiled: str = "boundary"
    max_buffer: int | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "warn"):
            raise UsageError(f'on_error: {self.on_error!r} is neither "raise" nor "warn"')
        if self.compiled not in ("boundary", "eager"):
            raise UsageError(f'compiled: {self.compiled!r} is neither "boundary" nor "eager"')


class Tap:
    """What `tensortap.capture` returns. Use it as a context manager, or call `close()` when done."""

    def __init__(
        self, model: Any, path: str | Path, selection: Selection, options: Options, optimizer: Any = None
    ) -> None:
        self.path = Path(path)
        self._framework: Framework = framework_of(model)
        self._options = options
        self._selection = selection
        self._lock = threading.RLock()  # gradients may arrive on the engine's own threads
        self._clock = Clock()
        self._seconds = 0.0
        self._error: Exception | None = None
        self._told = False
        self._listening = False
        self._closed = False
        self.rank = self._framework.rank()
        tree = Tree(self._framework, model, eager=options.compiled == "eager")
        chosen = [s for s in tree.sites if selection.wants_module(s.name, s.cls, s.owner)]
        selection.check_found(len(chosen), [s.name for s in tree.sites], {s.cls for s in tree.sites})
        self._book = CoverageBook(chosen, tree.aliases, selection.kinds, self._frozen(chosen))
        self._writer: RunWriter | None = None
        with ExitStack() as undo:  # a failure half-way takes back what was placed
            if selection.wants_rank(self.rank):
                self._open(tree, [site.name for site in chosen], optimizer, undo)
            self._undo = undo.pop_all()

    def _open(self, tree: Tree, chosen: list[str], optimizer: Any, undo: ExitStack) -> None:
        threads = self._framework.compute_threads(tree.sites[0].owner)
        self._writer = RunWriter(
            self.path,
            rank=self.rank,
            world=self._framework.world(),
            info=self._info(tree),
            overwrite=self._options.overwrite,
            max_buffer=self._options.max_buffer,
            crowded=threads >= cores(),
        )
        undo.callback(self._writer.close, "failed", "the tap could not be placed")
        kernels.borrow_threads(self._framework.openmp(), threads)
        self._recorder = Recorder(self._framework, self._writer, self.rank)
        self._watcher = Watcher(self._framework, tree, chosen, self._selection, self._clock, self._book, self._recorder)
        if self._options.compiled == "eager":
            undo.callback(self._framework.run_eagerly())
            self._book.notice("compiled modules ran uncompiled: an error of the compiler cannot show here")
        self._watcher.place(self._guard, undo)
        if optimizer is not None:
            undo.callback(self._framework.on_optimizer_step(optimizer, self.step))
        closer = partial(_close_forgotten, weakref.ref(self))
        atexit.register(closer)
        undo.callback(atexit.unregister, closer)
        self._begin_step()

    def _info(self, tree: Tree) -> dict[str, Any]:
        return {
            "framework": self._framework.name,
            "model": tree.sites[0].cls,
            "modules": len(tree.sites),
            "config": self._selection.described() | {"compiled": self._options.compiled},
            "environment": self._framework.environment()
            | {"python": platform.python_version(), "platform": platform.platform()},
        }

    def _frozen(self, sites: list[Site]) -> list[str]:
        """Names of modules whose own parameters all take no gradient."""

        def frozen(site: Site) -> bool:
            parameters = self._framework.parameters(site.owner)
            return bool(parameters) and not any(self._framework.requires_gradient(p) for _, p in parameters)

        return [site.name for site in sites if frozen(site)]

    # --- the public face ---------------------------------------------------------------------------------------
    def step(self) -> None:
        """One optimizer step is over. What stopped the tap is raised here, where it cannot harm the step."""
        if self._closed:
            raise UsageError("tap.step() after tap.close(): this run is finished; open a new tap")
        if self._writer is None:
            return
        with self._lock:
            self._end_step()
            self._clock.next_step()
            self._begin_step()
        self._tell()

    def flush(self) -> None:
        """Wait until all that was recorded so far is in the run's files, where a kill cannot take it back."""
        if self._writer is None or self._closed:
            return
        try:
            with self._lock:
                self._writer.flush()
        except Exception as error:
            self._stop(error)
        self._tell()

    def close(self, status: str = "finished", reason: str = "") -> None:
        """Take every hook off and finish the files. Calling it twice does no harm."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            try:
                self._end_step()
                self._listening = False
                if self._error is not None:
                    status, reason = "failed", str(self._error)
                if self._writer is not None:
                    if self._error is None:
                        self._writer.coverage(self._book.rows(), self._book.notices)
                    self._writer.close(status, reason)
            except Exception as error:
                self._stop(error)
            finally:
                self._undo.close()
                kernels.release()
        self._tell()

    @property
    def coverage(self) -> list[Coverage]:
        """For each selected module: seen, never called, no gradient, alias or skipped, and why."""
        return self._book.rows()

    @property
    def notices(self) -> list[str]:
        """What the tap could not see or could not help, for the run as a whole."""
        return self._book.notices

    def stats(self) -> dict[str, Any]:
        """What the tap has cost and written so far."""
        written = self._writer.stats() if self._writer is not None else {}
        return {"steps": self._clock.step, "seconds_in_hooks": self._seconds} | written

    def __enter__(self) -> Tap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close("failed", f"{kind.__name__}: {error}".removesuffix(": "))
        except TensortapError as second:  # the user's own error matters more
            if sys.version_info >= (3, 11) and error is not None:
                error.add_note(f"tensortap also failed: {second}")

    # --- steps -------------------------------------------------------------------------------------------------
    def _begin_step(self) -> None:
        self._listening = self._error is None and self._selection.wants_step(self._clock.step)

    def _end_step(self) -> None:
        if not self._listening or self._writer is None:
            return
        try:
            self._watcher.end_step()
            self._recorder.end_step()
            if self._book.changed:
                self._writer.coverage(self._book.rows(), self._book.notices)
            self._writer.end_step(self._clock.step)
        except Exception as error:
            self._stop(error)
            self._watcher.drop()

    # --- errors ------------------------------------------------------------------------------------------------
    def _guard(self, hook: Callable[..., None]) -> Callable[..., None]:
        """What goes wrong in a hook must not break the step it is called from: it stops the tap instead."""

        def guarded(*args: Any) -> None:
            if not self._listening:
                return
            started = time.perf_counter()
            try:
                with self._lock:
                    hook(*args)
            except Exception as error:
                self._stop(error)
            self._seconds += time.perf_counter() - started

        return guarded

    def _stop(self, error: Exception) -> None:
        """No more is recorded; it is told at the next moment that cannot harm training."""
        self._listening = False
        self._error = self._error or error

    def _tell(self) -> None:
        if self._error is None or self._told:
            return
        self._told = True
        message = (
            f"tensortap stopped recording into {self.path} at step {self._clock.step}: {self._error} "
            "(what was written before is readable)"
        )
        if self._options.on_error == "warn":
            warnings.warn(f"{message}; training goes on untapped", RuntimeWarning, stacklevel=4)
        else:
            raise CaptureError(message) from self._error


def _close_forgotten(tap: weakref.ref[Tap]) -> None:
    """At exit: a tap that nobody closed still leaves a whole run behind."""
    if (forgotten := tap()) is not None:
        forgotten.close("finished", "closed at exit")

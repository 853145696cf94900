"""Keeps hooks on a model from step to step, hands every tensor to a sink, and takes everything back at the end.

What the sink does with the tensors is its own affair: a tap writes them into a run, other sinks print them or put them
into files of other formats. All of them see the same calls, counts and gradients.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

from tensortap import kernels
from tensortap.capture.clock import Clock
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.evaluation import Evaluation
from tensortap.capture.messages import say
from tensortap.capture.selection import Keep, Selection
from tensortap.capture.tree import Site, Tree
from tensortap.capture.watcher import Watcher
from tensortap.core.presentation import CoverageRows
from tensortap.core.records import Coverage, Key
from tensortap.errors import CaptureError, StoreWriteError, TensortapError, UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework

__all__ = ["Observer", "Sink"]

Self = TypeVar("Self", bound="Observer")


class Sink(Protocol):
    """Where the tensors go."""

    where: str
    """For messages: the path, or another word for the place."""

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        """A tensor was seen. It may be changed or freed right after."""

    def end_step(self, step: int, book: CoverageBook) -> None:
        """A recorded step is over."""

    def close(self, status: str, reason: str, book: CoverageBook) -> None:
        """Nothing more will come."""


class Observer:
    """Watches a model for a sink, or for nobody if there is none. A context manager; or call `close()` when done."""

    _ignores_evaluation = False
    """Whether evaluation forwards between training steps are neither recorded nor counted."""

    def __init__(
        self,
        model: Any,
        selection: Selection,
        open_sink: Callable[[], Sink] | None,
        *,
        on_error: str = "warn",
        eager: bool | None = None,
        optimizer: Any = None,
    ) -> None:
        """`eager` says whether compiled modules run uncompiled; None if the caller has no option to choose."""
        if on_error not in ("raise", "warn"):
            raise UsageError(f'on_error: {on_error!r} is neither "raise" nor "warn"')
        model = network_of(model)
        self._framework: Framework = framework_of(model)
        self._selection = selection
        self._sink: Sink | None = None
        self._on_error = on_error
        self._lock = threading.RLock()  # gradients may arrive on the engine's own threads
        self._clock = Clock()
        self._seconds = 0.0
        self._eager = eager
        self._idle_steps = 0
        self._error: Exception | None = None
        self._told = False
        self._listening = False
        self._closed = False
        self._tree = Tree(self._framework, model, bool(eager))
        chosen = [s for s in self._tree.sites if selection.wants_module(s.name, s.cls, s.owner)]
        names, classes = [s.name for s in self._tree.sites], {s.cls for s in self._tree.sites}
        selection.check_found(len(chosen), names, classes)
        self._book = CoverageBook(chosen, self._tree.aliases, selection.kinds, self._frozen(chosen))
        for text in selection.unmatched([site.name for site in chosen]):
            self._book.notice(text)
        for site in chosen:
            self._book.remark(site.name, self._framework.remarks(site.owner))
        for wrapper in self._tree.wrappers:
            self._book.notice(self._framework.remarks(wrapper))
        self._note_compiled(chosen)
        with ExitStack() as undo:  # a failure half-way takes back what was placed
            if open_sink is not None:  # opened last: arguments that cannot be meant leave nothing behind
                self._sink = open_sink()
                undo.callback(self._sink.close, "failed", "the hooks could not be placed", self._book)
                self._watch(self._sink, [site.name for site in chosen], optimizer, undo)
            self._undo = undo.pop_all()

    def _watch(self, sink: Sink, chosen: list[str], optimizer: Any, undo: ExitStack) -> None:
        self._watcher = self._new_watcher(sink, chosen)
        if self._ignores_evaluation:
            root = self._tree.sites[0].owner
            self._watcher.evaluation = Evaluation(self._framework, root, trains=optimizer is not None)
        if self._eager:
            undo.callback(self._framework.run_eagerly())
            self._book.notice("compiled modules ran uncompiled: an error of the compiler cannot show here")
        self._watcher.place(self._guard, undo)
        if optimizer is not None:
            undo.callback(self._framework.on_optimizer_step(optimizer, self.step))
        closer = partial(_close_forgotten, weakref.ref(self))
        atexit.register(closer)
        undo.callback(atexit.unregister, closer)
        self._begin_step()

    def _new_watcher(self, sink: Sink, chosen: list[str]) -> Watcher:
        return Watcher(self._framework, self._tree, chosen, self._selection, self._clock, self._book, sink.record)

    def _frozen(self, sites: list[Site]) -> list[str]:
        """Names of modules whose own parameters all take no gradient."""

        def frozen(site: Site) -> bool:
            parameters = self._framework.parameters(site.owner)
            return bool(parameters) and not any(self._framework.requires_gradient(p) for _, p in parameters)

        return [site.name for site in sites if frozen(site)]

    def _note_compiled(self, sites: list[Site]) -> None:
        inside = sum(site.inside is not None and site.callable for site in sites)
        if inside and self._eager is False:
            self._book.notice(
                f"{inside} of {len(sites)} modules run inside compiled graphs, where inputs, outputs and their "
                'gradients are not recorded: compiled="eager" runs them uncompiled'
            )

    def _note_idle_steps(self) -> None:
        if self._idle_steps and self._eager is False:
            steps = self._idle_steps + self._book.captured_steps
            self._book.notice(
                f"no module ran in {self._idle_steps} of {steps} recorded steps: if a compiled function calls the "
                'model (torch.compile, paddle.jit.to_static), pass compiled="eager"'
            )

    # --- the public face ---------------------------------------------------------------------------------------
    def step(self) -> None:
        """Mark the end of an optimizer step. An error that stopped the recording is reported here, not in a hook."""
        if self._closed:
            raise UsageError("step() after close(): this recording is finished; start a new one")
        if self._sink is None:
            return
        with self._lock:
            self._idle_steps += self._listening and not self._watcher.armed
            self._end_step()
            self._clock.next_step()
            self._begin_step()
            if not self._listening:
                self._watcher.drop()
        self._tell()

    def close(self, status: str = "finished", reason: str = "") -> None:
        """Take every hook off and finish what was begun. Calling it twice does no harm."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            try:
                self._end_step()
                self._listening = False
                self._note_outcome(status)
                if self._error is not None:
                    status, reason = "failed", str(self._error)
                if self._sink is not None:
                    self._sink.close(status, reason, self._book)
            except Exception as error:
                self._stop(error)
            finally:
                self._undo.close()
                kernels.release()
        self._tell()

    @property
    def coverage(self) -> list[Coverage]:
        """For each selected module: seen, never called, no gradient, alias or skipped, and why."""
        return CoverageRows(self._book.rows())

    @property
    def notices(self) -> list[str]:
        """What could not be seen or could not be helped, for the run as a whole."""
        return self._book.notices

    def __enter__(self: Self) -> Self:
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
        if not self._listening or self._sink is None:
            return
        try:
            self._watcher.end_step()
            self._sink.end_step(self._clock.step, self._book)
        except Exception as error:
            self._stop(error)
            self._watcher.drop()

    def _note_outcome(self, status: str) -> None:
        """All has been seen: note what is to be said about the recording as a whole."""
        self._note_idle_steps()
        for text in self._framework.notices():
            self._book.notice(text)
        if self._sink is not None and self._watcher.evaluation is not None:
            self._book.notice(self._watcher.evaluation.notice())

    # --- errors ------------------------------------------------------------------------------------------------
    def _guard(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """What goes wrong in a hook must not break the step it is called from: it stops the recording instead."""

        def guarded(*args: Any) -> Any:
            if not self._listening:
                return None
            started = time.perf_counter()
            try:
                with self._lock:
                    return hook(*args)
            except Exception as error:
                self._stop(error)
                return None
            finally:
                self._seconds += time.perf_counter() - started

        return guarded

    def _stop(self, error: Exception) -> None:
        """No more is recorded; it is told at the next moment that cannot harm training."""
        self._listening = False
        self._error = self._error or error

    def _tell(self) -> None:
        """Report the error that stopped the recording, once."""
        if self._error is None or self._told:
            return
        self._told = True
        where = self._sink.where if self._sink is not None else "nowhere"
        reason = str(self._error) or type(self._error).__name__
        message = f"stopped recording into {where} at step {self._clock.step}: {reason}"
        if not isinstance(self._error, StoreWriteError):  # which says it itself
            message += " (what was written before is readable)"
        if self._on_error == "raise":
            raise CaptureError(f"tensortap {message}") from self._error
        say(f"{message}; training goes on untapped")


def _close_forgotten(observer: weakref.ref[Observer]) -> None:
    """At exit: a tap that nobody closed still leaves a whole run behind."""
    if (forgotten := observer()) is not None:
        forgotten.close("finished", "closed at exit")

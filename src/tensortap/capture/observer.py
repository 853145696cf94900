"""Keeps hooks on a model from step to step, passes every tensor to a sink, and removes everything at the end.

A tap's sink writes the tensors into a run; other sinks print them or write files of other formats. All of them see the
same calls, counts and gradients.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

from tensortap import kernels
from tensortap.capture import garbage
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.loop.optimizers import Optimizers
from tensortap.capture.messages import say
from tensortap.capture.modules.model_changes import ModelChanges
from tensortap.capture.modules.tree import NamesOf, Site, Tree
from tensortap.capture.selection import Keep, Selection
from tensortap.capture.watching.clock import Clock
from tensortap.capture.watching.hook_guard import HookGuard, new_lock
from tensortap.capture.watching.inside import InsideCalls, InsideOptions
from tensortap.capture.watching.modes import Modes
from tensortap.capture.watching.watcher import Watcher
from tensortap.core.interrupts import interrupt_in
from tensortap.core.presentation import CoverageRows
from tensortap.core.records import Coverage, Key
from tensortap.errors import CaptureError, StoreWriteError, TensortapError, UsageError
from tensortap.frameworks import Framework, framework_of, network_of, require
from tensortap.frameworks.capabilities import (
    EagerExecution,
    GradientGraph,
    InsideGraphs,
    OperatorTraces,
    OptimizerSteps,
)

__all__ = ["Observer", "Sink"]

Self = TypeVar("Self", bound="Observer")

_NEEDED_FOR: dict[type, str] = {
    EagerExecution: 'compiled="eager"',
    GradientGraph: "recording grad_input",
    InsideGraphs: 'compiled="inside"',
    OperatorTraces: "recording operators",
    OptimizerSteps: "counting steps through optimizer=",
}


class Sink(Protocol):
    """Receives the tensors."""

    where: str
    """The destination, for messages: a path, or "memory"."""

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        """Record a tensor, which may be changed or freed right after."""

    def end_step(self, step: int, book: CoverageBook) -> None:
        """Finish a recorded step."""

    def close(self, status: str, reason: str, book: CoverageBook) -> None:
        """Finish the recording."""


class Observer:
    """Observes a model for a sink. Use it as a context manager, or call `close()` when done."""

    _separates_evaluation = False
    """Whether forwards of an evaluation between training steps are distinguished from those of training."""
    _watcher_class: type[Watcher] = Watcher
    _records_evaluation = False
    """Whether forwards of an evaluation are recorded, too, in a phase of their own."""

    def __init__(
        self,
        model: Any,
        selection: Selection,
        open_sink: Callable[[], Sink] | None,
        *,
        on_error: str = "warn",
        eager: bool | None = None,
        optimizer: Any = None,
        inside: InsideOptions | None = None,
    ) -> None:
        """Place the hooks.

        eager: whether compiled modules run uncompiled; None if the caller has no such option.
        inside: how modules inside compiled graphs are seen; None if they are not.
        """
        if on_error not in ("raise", "warn"):
            raise UsageError(f'on_error: {on_error!r} is neither "raise" nor "warn"')
        model = network_of(model)
        self._framework: Framework = framework_of(model)
        self._require_capabilities(selection, bool(eager), optimizer is not None)
        if inside is not None:
            self._require(InsideGraphs)
        self._selection = selection
        self._sink: Sink | None = None
        self._on_error = on_error
        self._lock = new_lock()  # gradients may arrive on the engine's threads
        self._guard = HookGuard(self._lock, self._handle, self._deliver_interrupt)
        self._clock = Clock()
        self._eager = eager
        self._inside = inside
        self._idle_steps = 0
        self._error: BaseException | None = None
        self._stopped_in = 0
        self._reported = False
        self._closed = False
        self._optimizers: Optimizers | None = None
        self._model = model
        self._tree = Tree(self._framework, model, bool(eager), names=self._names_of(model))
        chosen = [s for s in self._tree.sites if selection.wants_module(s.name, s.cls, s.owner)]
        names, classes = [s.name for s in self._tree.sites], {s.cls for s in self._tree.sites}
        unmatched = selection.check_found(len(chosen), names, classes)
        selection.check_operators([site.name for site in chosen])
        bare = [site.name for site in chosen if not self._framework.parameters(site.owner)]
        self._book = CoverageBook(chosen, self._tree.aliases, selection.kinds, self._frozen(chosen), bare)
        for text in (*unmatched, *selection.unmatched([site.name for site in chosen])):
            self._book.notice(text)
        for text in unmatched:
            self._report_unmatched(text)
        for site in chosen:
            self._book.remark(site.name, self._framework.remarks(site.owner))
        for wrapper in self._tree.wrappers:
            self._book.notice(self._framework.remarks(wrapper))
        self._note_compiled(chosen)
        with ExitStack() as undo, garbage.paused():  # a failure half-way removes what was placed
            if open_sink is not None:  # opened last, so that invalid arguments leave nothing behind
                self._sink = open_sink()
                undo.callback(self._sink.close, "failed", "the hooks could not be placed", self._book)
                self._watch(self._sink, [site.name for site in chosen], optimizer, undo)
            self._undo = undo.pop_all()

    def _names_of(self, model: Any) -> NamesOf | None:
        """Return the function that names the modules, if the model is a part of a larger one."""
        return None

    def _watch(self, sink: Sink, chosen: list[str], optimizer: Any, undo: ExitStack) -> None:
        self._watcher = self._new_watcher(sink, chosen)
        self._watcher.modes = Modes(
            self._framework,
            self._tree.sites[0].owner,
            trains=optimizer is not None,
            separate=self._separates_evaluation,
            recorded=self._records_evaluation,
        )
        if self._eager:
            undo.callback(self._require(EagerExecution).run_eagerly())
            self._book.notice("compiled modules ran uncompiled: an error of the compiler cannot show here")
        if self._inside is not None:
            self._see_inside(self._inside)
        self._watcher.place(self._guard, undo)
        changes = ModelChanges(
            self._framework,
            self._model,
            self._selection,
            self._tree,
            self._clock,
            self._book,
            self._watcher,
            self._handle,
        )
        changes.compiled = self._note_compiled
        changes.place(undo)
        if optimizer is not None:
            self._optimizers = self._new_optimizers(optimizer)
            self._optimizers.place(self._guard, undo)
        closer = partial(_close_at_exit, weakref.ref(self))
        atexit.register(closer)
        undo.callback(atexit.unregister, closer)
        self._begin_step()

    def _see_inside(self, options: InsideOptions) -> None:
        framework = self._require(InsideGraphs)
        taps = framework.graph_taps(frozenset(self._selection.kinds), options.emulate_casts)
        self._watcher.inside = InsideCalls(taps, self._watcher, self._book)
        self._watcher.inside.address = framework.memory_of
        self._book.notice(taps.rounding)
        self._book.sees_inside = True

    def _report_unmatched(self, text: str) -> None:
        """Report a part of the selection that matches nothing while it can still be corrected."""
        if self._framework.world() < 2:  # a rank may lack modules that others have
            say(text)

    def _require_capabilities(self, selection: Selection, eager: bool, optimizer: bool) -> None:
        """Raise UsageError for options that the framework does not support, before anything is opened."""
        if eager:
            self._require(EagerExecution)
        if optimizer:
            self._require(OptimizerSteps)
        if "grad_input" in selection.kinds:
            self._require(GradientGraph)
        if selection.operators is not None:
            self._require(OperatorTraces)

    def _require(self, capability: type) -> Any:
        return require(self._framework, capability, _NEEDED_FOR[capability])

    def _new_watcher(self, sink: Sink, chosen: list[str]) -> Watcher:
        return self._watcher_class(
            self._framework, self._tree, chosen, self._selection, self._clock, self._book, sink.record
        )

    def _new_optimizers(self, optimizer: Any) -> Optimizers:
        return Optimizers(self._require(OptimizerSteps), optimizer, self._count_step)

    def _frozen(self, sites: list[Site]) -> list[str]:
        """Return the names of modules whose own parameters are all frozen."""

        def frozen(site: Site) -> bool:
            parameters = self._framework.parameters(site.owner)
            return bool(parameters) and not any(self._framework.requires_gradient(p) for _, p in parameters)

        return [site.name for site in sites if frozen(site)]

    def _note_compiled(self, sites: list[Site]) -> None:
        inside = sum(site.inside is not None and site.callable for site in sites)
        if inside and self._eager is False and self._inside is None:
            self._book.notice(
                f"{inside} of {len(sites)} modules run inside compiled graphs, where inputs, outputs and their "
                'gradients are not recorded: compiled="eager" runs them uncompiled'
            )

    def _note_idle_steps(self) -> None:
        if self._idle_steps and self._eager is False:
            steps = self._idle_steps + self._book.captured_steps
            self._book.notice(
                f"no module ran in {self._idle_steps} of {steps} recorded steps: if a compiled function calls the "
                'model (torch.compile, paddle.jit.to_static), pass compiled="eager"; if the model was replaced, tap '
                "the one that is called"
            )

    # --- public interface --------------------------------------------------------------------------------------
    def step(self) -> None:
        """Mark the end of an optimizer step. An error that stopped the recording is reported here, not in a hook.

        If the optimizers given as `optimizer=` have just ended the step, this does nothing; from then on, only this
        method ends steps.
        """
        if self._closed:
            raise UsageError("step() after close(): this recording is finished; start a new one")
        if self._sink is not None and (self._optimizers is None or self._optimizers.steps.called()):
            self._count_step()

    def _count_step(self) -> None:
        with self._lock:
            if self._optimizers is not None:
                self._optimizers.step_ends()
            self._idle_steps += self._guard.listening and not self._watcher.armed
            ran = self._watcher.armed and self._clock.idle
            was_recorded = self._guard.listening or self._watcher.armed
            self._end_step()
            self._clock.next_step()
            self._begin_step()
            if self._guard.listening:
                self._try(self._watcher.attach)
            else:
                if was_recorded:  # otherwise nothing was placed in it
                    self._try(self._watcher.drop)
                if ran or not self._framework.uses_compiler():
                    # Otherwise a compiled function may contain the modules, and would be compiled again.
                    self._try(self._watcher.detach)
        self._report_error()
        self._deliver_interrupt()

    def close(self, status: str = "finished", reason: str = "") -> None:
        """Remove every hook and finish the recording. A second call has no effect."""
        if self._closed:
            return
        self._closed = True
        with self._lock, garbage.paused():
            try:
                self._end_step()
                self._guard.listening = False
                self._try(partial(self._note_outcome, status))
                if self._error is not None:
                    status, reason = "failed", str(self._error) or type(self._error).__name__
                elif self._guard.interrupt is not None and status == "finished":
                    status, reason = "failed", _reason(self._guard.interrupt)
                if self._sink is not None:
                    self._try(partial(self._sink.close, status, reason, self._book))
            finally:
                self._try(self._undo.close)
                kernels.release()
        self._report_error()
        self._deliver_interrupt()

    @property
    def coverage(self) -> list[Coverage]:
        """Status of each selected module (seen, never called, no gradient, alias or skipped), and its reason."""
        return CoverageRows(self._book.rows())

    @property
    def notices(self) -> list[str]:
        """Notices about the run as a whole: what the tap could not see or had to change."""
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
            self._guard.interrupt = None  # the later error reaches the user instead
            self.close("failed", _reason(error) if error is not None else kind.__name__)
        except TensortapError as second:  # the user's own error takes precedence
            if sys.version_info >= (3, 11) and error is not None:
                error.add_note(f"tensortap also failed: {second}")

    # --- steps -------------------------------------------------------------------------------------------------
    def _begin_step(self) -> None:
        self._guard.listening = self._error is None and self._wants_step(self._clock.step)

    def _wants_step(self, step: int) -> bool:
        return self._selection.wants_step(step)

    def _end_step(self) -> None:
        if self._guard.interrupt is not None:
            self._guard.listening = self._error is None
        if not self._guard.listening or self._sink is None:
            return
        try:
            self._watcher.end_step()
            self._sink.end_step(self._clock.step, self._book)
        except Exception as error:
            self._handle(error)
            self._try(self._watcher.drop)

    def _note_outcome(self, status: str) -> None:
        """Add the notices about the recording as a whole, once everything was seen."""
        self._note_idle_steps()
        for text in self._framework.notices():
            self._book.notice(text)
        if self._sink is not None and self._watcher.modes is not None:
            for text in self._watcher.modes.notices():
                self._book.notice(text)

    # --- errors ------------------------------------------------------------------------------------------------
    def _try(self, task: Callable[[], None]) -> None:
        """Run a task outside of hooks. An error in it stops the recording, not the training."""
        try:
            task()
        except Exception as error:
            self._handle(error)

    def _handle(self, error: BaseException) -> None:
        """Stop recording after an error. Raise an interrupt again, now or where it next reaches the user."""
        interrupt = interrupt_in(error) if isinstance(error, Exception) else error
        if interrupt is None:
            self._stop(error)
            return
        step, name = self._clock.step, type(interrupt).__name__
        self._book.notice(f"{name} interrupted the tap at step {step}: records of that step may be missing")
        if self._framework.propagates_exceptions():
            raise interrupt
        self._guard.interrupt = self._guard.interrupt or interrupt
        self._guard.listening = False  # until the next hook, or the end of the step, delivers it

    def _deliver_interrupt(self) -> None:
        """Raise an interrupt that came in a hook through which the framework does not propagate exceptions."""
        if self._guard.interrupt is not None and self._framework.propagates_exceptions():
            interrupt, self._guard.interrupt = self._guard.interrupt, None
            self._guard.listening = self._error is None and not self._closed
            raise interrupt

    def _stop(self, error: BaseException) -> None:
        """Stop recording. The error is reported at the next point that cannot harm training."""
        self._guard.listening = False
        if self._error is None:
            self._error, self._stopped_in = error, self._clock.step

    def _report_error(self) -> None:
        """Report the error that stopped the recording, once."""
        if self._error is None or self._reported:
            return
        self._reported = True
        where = self._sink.where if self._sink is not None else "nowhere"
        reason = str(self._error) or type(self._error).__name__
        message = f"stopped recording into {where} at step {self._stopped_in}: {reason.removesuffix('.')}"
        if not isinstance(self._error, StoreWriteError):  # its message says so
            message += " (earlier records are readable)"
        if self._on_error == "raise":
            raise CaptureError(f"tensortap {message}") from self._error
        say(f"{message}; training continues untapped")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _close_at_exit(observer: weakref.ref[Observer]) -> None:
    """Close a tap at exit that was never closed, so that its run is complete."""
    if (unclosed := observer()) is not None:
        unclosed.close("finished", "closed at exit")

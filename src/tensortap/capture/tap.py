"""The tap: an observer that writes records into a run."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tensortap.capture import garbage
from tensortap.capture.budget import Budget
from tensortap.capture.loop.book import LoopBook
from tensortap.capture.loop.detached import DetachedValues
from tensortap.capture.loop.optimizers import Optimizers
from tensortap.capture.loop.recomputed import Recomputations
from tensortap.capture.loop.rows import InputRows
from tensortap.capture.loop.visible import VisibleValues
from tensortap.capture.messages import say
from tensortap.capture.modules.tree import NamesOf
from tensortap.capture.observer import Observer, Sink
from tensortap.capture.placement.parallel import Parallel
from tensortap.capture.run_sink import RunSink
from tensortap.capture.selection import Selection
from tensortap.capture.tap_options import TapOptions
from tensortap.capture.watching.inside import InsideOptions
from tensortap.capture.watching.operators import OperatorRecords
from tensortap.capture.watching.planned_watcher import PlannedWatcher
from tensortap.capture.watching.uncounted_steps import UncountedSteps
from tensortap.capture.watching.watcher import Watcher
from tensortap.core.interrupts import raise_interrupt, suppress_errors
from tensortap.core.presentation import reports
from tensortap.core.records import GRADIENT_KINDS
from tensortap.core.urls import Url, as_place
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.capabilities import DeviceMark
from tensortap.store.memory import MemoryWriter
from tensortap.store.run import Run
from tensortap.store.run_folder import open_run

__all__ = ["Tap"]


class Tap(Observer):
    """The result of `tensortap.capture`. Use it as a context manager, or call `close()` when done."""

    _separates_evaluation = True

    def __init__(
        self,
        model: Any,
        path: str | Path | Url | None,
        selection: Selection,
        options: TapOptions,
        optimizer: Any = None,
    ) -> None:
        self.path = None if path is None else as_place(path)
        """The folder or URL of the run; None if it is in memory."""
        self.rank = framework_of(network_of(model)).rank()
        self._run: RunSink | None = None
        self._reader: Run | None = None
        self._uncounted: UncountedSteps | None = None
        self._loop: LoopBook | None = None
        self._recorded_steps = 0
        self._last_was_recorded = False
        self._options = options
        self._records_evaluation = options.evaluation
        started = time.perf_counter()
        self._opened = started
        self._next_progress = 0.0
        self._step_seconds = 0.0
        """Time at the ends of steps, and to open the run."""
        self._budget: Budget | None = None
        if options.budget is not None and selection.steps is None and selection.wants_rank(self.rank):
            self._budget = Budget(options.budget, self._device_marks(network_of(model)))
        try:
            super().__init__(
                model,
                selection,
                self._open_run if selection.wants_rank(self.rank) else None,
                on_error=options.on_error,
                eager=options.compiled == "eager",
                optimizer=optimizer,
                inside=InsideOptions(options.emulate_casts) if options.compiled == "inside" else None,
            )
        except UsageError:
            if self._run is not None:  # closed already; the corrected call must find its path free
                self._run.writer.delete()
            raise
        if options.budget is not None and selection.steps is not None:
            self._book.notice(f"budget={options.budget:g} is not applied: steps= selects the steps")
        self._step_seconds += time.perf_counter() - started
        if self._run is not None:
            garbage.throttle(this := object())
            resume = weakref.finalize(self, garbage.resume, this)  # once, also without close()
            resume.atexit = False
            self._undo.callback(resume)

    def _open_run(self) -> RunSink:
        parallel = self._parallel
        parallel.check(self._framework, self._tree)
        for text in parallel.notices:
            self._book.notice(text)
        parallel.report = self._book.notice
        self._run = RunSink(
            self._framework, self._tree, self.path, self._selection, self._options, self._lock, parallel
        )
        return self._run

    def _names_of(self, model: Any) -> NamesOf | None:
        self._parallel = Parallel(self._framework, model, self._options.layout)
        return self._parallel.names

    _watcher_class = PlannedWatcher

    def _new_watcher(self, sink: Sink, chosen: list[str]) -> Watcher:
        watcher = super()._new_watcher(sink, chosen)
        self._connect(watcher)
        return watcher

    def _connect(self, watcher: Watcher) -> None:
        """Let a watcher record into the run."""
        if self._run is not None:
            kinds = self._selection.kinds
            self._uncounted = UncountedSteps(self._framework, self._tree, self._clock, self._book, kinds)
            loop_fact = self._run.writer.loop_fact
            self._loop = LoopBook(
                self._framework, lambda: watcher.tree, self._clock, loop_fact, [*kinds], self._book.notice
            )
            watcher.destination = replace(
                self._run.destination,
                step_begins=self._loop.step_begins,
                step_seen=self._loop.forward_ended,
                forward_begins=partial(self._forward_begins, watcher),
            )
            watcher.visible = VisibleValues(self._framework, loop_fact)
            if "input" in kinds:
                watcher.rows = InputRows(self._framework, loop_fact)
            if self._selection.operators is not None:
                gradients = not set(GRADIENT_KINDS).isdisjoint(kinds)
                watcher.operators = OperatorRecords(self._framework, self._selection, self._book, gradients)
                watcher.operators.note_compiled(self._tree.sites)
                watcher.operators.record, watcher.operators.hold = watcher.record_operator, watcher.hold
            if not set(GRADIENT_KINDS).isdisjoint(kinds):
                watcher.detached = DetachedValues(self._framework, loop_fact)
                watcher.recomputations = Recomputations(self._framework, self._clock, loop_fact)

    def _watch(self, sink: Sink, chosen: list[str], optimizer: Any, undo: ExitStack) -> None:
        super()._watch(sink, chosen, optimizer, undo)
        if self._watcher.modes is not None:
            self._watcher.modes.discard_trial = self._discard_trial

    def _discard_trial(self) -> None:
        """Begin the run again: its records so far were no training."""
        if self._run is None or self._clock.step:
            return
        self._run.discard()
        self._options = replace(self._options, overwrite=False)
        self._watcher.restart()
        self._clock.restart()
        self._book.restart()
        self._sink = self._open_run()
        self._connect(self._watcher)
        if self._optimizers is not None:
            self._connect_optimizers(self._optimizers)

    def _new_optimizers(self, optimizer: Any) -> Optimizers:
        optimizers = super()._new_optimizers(optimizer)
        self._connect_optimizers(optimizers)
        return optimizers

    def _connect_optimizers(self, optimizers: Optimizers) -> None:
        """Write the steps and settings of optimizers into the run."""
        if optimizers.several and self._uncounted is not None:  # one of them steps before the step ends
            self._uncounted = None
        if self._uncounted is not None:
            self._uncounted.expect_optimizer()
        if self._loop is not None:
            optimizers.before = self._optimizer_begins
            optimizers.after, optimizers.ends = self._loop.optimizer_ended, self._loop.step_ends

    def _forward_begins(self, watcher: Watcher) -> None:
        if self._uncounted is not None:
            self._uncounted.forward_begins()
        if self._loop is not None:
            self._loop.forward_begins(watcher.watched_sites)

    def _optimizer_begins(self, name: str, optimizer: Any) -> None:
        if self._uncounted is not None:
            self._uncounted.optimizer_begins()
        if self._loop is not None:
            self._loop.optimizer_begins(self._watcher, name, optimizer)

    def _note_outcome(self, status: str) -> None:
        super()._note_outcome(status)
        if self._run is None:
            return
        self._show_progress()
        if self._budget is not None:
            self._book.notice(self._budget.notice())
        if self._uncounted is not None:
            self._book.notice(self._uncounted.notice())
            self._uncounted.release()
        if not self._run.records and self._error is None and status == "finished":
            text = f"nothing was recorded into {self._run.where}: {self._why_empty()}"
            self._book.notice(text)
            say(text)

    def _why_empty(self) -> str:
        if self._book.any_call:
            return f"modules were called, but they had no tensor of kinds={', '.join(self._selection.kinds)}"
        if not self._clock.step and self._watcher.modes is not None and self._watcher.modes.evaluations:
            return (
                "every forward was an evaluation (autograd off, or the model in eval mode); "
                "leave optimizer= out to record a run that does not train, or pass evaluation=True"
            )
        if self._watcher.modes is not None and self._watcher.modes.traces:
            return "every forward ran without values (torch.jit.trace, fake tensors)"
        if not self._recorded_steps:
            return f"none of the steps 0 to {self._clock.step} is one that steps= selects"
        return (
            "no module of the tapped model ran. If it was compiled after the tap was opened, or a compiled function "
            'calls it, pass compiled="eager" or tap the compiled model; if it was replaced, tap the one that is called'
        )

    def _note_idle_steps(self) -> None:
        if self._run is None or self._run.records:  # otherwise the reason for an empty run says more
            known = self._book.notices
            super()._note_idle_steps()
            for text in self._book.notices[len(known) :]:
                say(text)

    def _count_step(self) -> None:
        started = time.perf_counter()
        self._step_began = started
        try:
            super()._count_step()
        finally:
            self._step_seconds += time.perf_counter() - started
        if started >= self._next_progress:
            self._show_progress()
        self._stop_training()

    def _show_progress(self) -> None:
        """Write the progress of the run, once a second, or less often if writing takes long."""
        if self._run is None:
            return
        now = time.perf_counter()
        value = {
            "step": self._clock.step,
            "recorded": self._book.captured_steps,
            "seconds": now - self._opened,
            "cost": self._guard.seconds + self._step_seconds if self._budget is None else self._budget.spent,
        }
        with suppress_errors():
            self._run.writer.progress(value)
        took = time.perf_counter() - now
        self._step_seconds += took
        self._next_progress = now + max(1.0, min(30.0, 100 * took))

    def _stop_training(self) -> None:
        """Raise the error of a NaN that was born, after the run is written."""
        if self._run is not None and (stop := self._run.incidents.take_stop()) is not None:
            self.flush()
            raise stop

    def keep(self) -> None:
        """Keep the tensors that the ring holds, with those of the step in progress. Needs `ring=`."""
        if self._closed:
            raise UsageError("keep() after close(): this recording is finished")
        if self._run is not None:
            with self._lock:
                self._run.incidents.keep(self._clock.step, "tap.keep() was called")

    def loss(self, value: Any) -> None:
        """Record the loss of this step: a number, or a tensor with one element, which is read now.

        It is part of the run, `tensortap watch` shows it, and a spike keeps the ring's tensors. Between two steps, it
        is the loss of the step that has ended.
        """
        if self._run is None:
            return
        between = self._clock.step > 0 and not self._watcher.armed
        if self._last_was_recorded if between else self._guard.listening:
            value = value.detach() if hasattr(value, "detach") else value
            self._run.incidents.alarm.add_loss(self._clock.step - between, float(value))

    def _begin_step(self) -> None:
        if self._budget is not None and self._clock.step:
            so_far = self._guard.seconds + self._step_seconds + time.perf_counter() - self._step_began
            self._budget.end_step(self._guard.listening, so_far)
        self._last_was_recorded = self._guard.listening
        super()._begin_step()
        self._recorded_steps += self._guard.listening

    def _wants_step(self, step: int) -> bool:
        return super()._wants_step(step) if self._budget is None else self._budget.wants(step)

    @staticmethod
    def _device_marks(model: Any) -> Callable[[], DeviceMark | None] | None:
        """Return the function that marks points on the device's timeline; None if the model computes on the host."""
        framework = framework_of(model)
        if framework.pinning(model) is None or not hasattr(framework, "device_mark"):
            return None
        return partial(framework.device_mark, model)

    def _report_error(self) -> None:
        # The run ends here, so that its reader sees the reason even if the process is killed later.
        if self._error is not None and self._run is not None and not self._reported:
            with suppress_errors():
                self._run.close("failed", str(self._error) or type(self._error).__name__, self._book)
        super()._report_error()

    def _stop(self, error: BaseException) -> None:
        super()._stop(error)
        if self._run is not None:
            self._run.discard_deferred()

    def flush(self) -> None:
        """Wait until everything recorded so far is in the run's files, where it survives a kill."""
        if self._run is None or self._closed:
            return
        try:
            with self._lock:
                self._run.flush()
        except Exception as error:
            raise_interrupt(error)
            self._stop(error)
        self._report_error()

    def note(self, text: str) -> None:
        """Add a line to the notices of the run, such as what it was resumed from."""
        with self._lock:
            self._book.notice(text)

    def discard(self) -> None:
        """Close the tap, and delete its records."""
        self.close()
        if self._run is not None:
            self._run.writer.delete()

    def number(self, number: int) -> None:
        """Note which run of its launch this is, if it is not the first."""
        if self._run is not None:
            self._run.writer.loop_fact(0, "launch", "", {"number": number})

    def add_optimizer(self, optimizer: Any, instead_of: Sequence[Any] = ()) -> None:
        """Count the steps of another optimizer, such as that of a second phase, which replaces the one of the first."""
        if self._optimizers is None:
            raise UsageError("this tap counts no steps of optimizers: pass optimizer= to capture")
        with self._lock:
            self._optimizers.add(optimizer, instead_of)

    @property
    def run(self) -> Run:
        """The run that this tap records. Inside the block it holds what was recorded so far.

        Each access inside the block flushes and returns a new view. Afterwards it is the complete run.
        """
        if not self._closed:
            self.flush()
            return self._view()
        self._reader = self._reader or self._view()
        return self._reader

    def __repr__(self) -> str:
        where = "memory" if self.path is None else str(self.path)
        state = "closed" if self._closed else "recording" if self._sink is not None else "not recording"
        return f"<Tap on {self._tree.sites[0].cls} into {where}: {state}, step {self._clock.step}>"

    def _repr_html_(self) -> str:
        return reports().tap_html(repr(self), self.stats(), self.coverage, self.notices)

    def _view(self) -> Run:
        if self.path is not None:
            return open_run(self.path)
        if self._run is None or not isinstance(self._run.writer, MemoryWriter):
            raise UsageError(f"rank {self.rank} records nothing, since ranks= excludes it, so it has no run in memory")
        return self._run.writer.run()

    def stats(self) -> dict[str, Any]:
        """Return the costs of the tap so far, and statistics of the data written."""
        written = self._run.writer.stats() if self._run is not None else {}
        own = {
            "steps": self._clock.step,
            "recorded_steps": self._recorded_steps,
            "seconds_in_hooks": self._guard.seconds,
            "seconds_at_step_ends": self._step_seconds,
        }
        return own | written

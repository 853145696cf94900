"""The sink of a tap: writes its tensors into one rank of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from tensortap import kernels
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.environment import describe_environment
from tensortap.capture.incidents.incidents import Incidents
from tensortap.capture.messages import say
from tensortap.capture.modules.tree import Site, Tree
from tensortap.capture.placement.parallel import Parallel
from tensortap.capture.recording.recorder import Recorder
from tensortap.capture.selection import Keep, Selection
from tensortap.capture.tap_options import TapOptions
from tensortap.capture.watching.destination import Destination
from tensortap.core.interrupts import interrupt_in
from tensortap.core.machine import cores
from tensortap.core.records import Key, display_name
from tensortap.core.urls import Place
from tensortap.frameworks.base import Framework
from tensortap.kernels import summarize
from tensortap.store.memory import MemoryWriter
from tensortap.store.writer.rank_writer import RankWriter

__all__ = ["RunSink"]


class RunSink:
    """Writes records into one rank of a run: at `path`, or in memory without one."""

    def __init__(
        self,
        framework: Framework,
        tree: Tree,
        path: Place | None,
        selection: Selection,
        options: TapOptions,
        lock: AbstractContextManager[Any],
        parallel: Parallel,
    ) -> None:
        threads = framework.compute_threads(tree.sites[0].owner)
        rank = framework.rank()
        info = {
            "framework": framework.name,
            "model": tree.sites[0].cls,
            "modules": len(tree.sites),
            "config": selection.described() | options.described(),
            "environment": describe_environment(framework.environment()),
        }
        self.where = "memory" if path is None else str(path)
        self.writer: RankWriter
        if path is None:
            self.writer = MemoryWriter(
                rank=rank,
                world=framework.world(),
                info=info,
                max_memory=options.max_memory,
                buckets=options.sketch,
                rotates=options.incidents.rotates,
            )
        else:
            self.writer = options.writer(path)(
                rank=rank,
                world=framework.world(),
                info=info,
                overwrite=options.overwrite,
                max_buffer=options.max_buffer,
                crowded=threads >= cores(),
                pinning=framework.pinning(tree.sites[0].owner),
                calls=True,
                loop=True,
                buckets=options.sketch,
                ring=options.incidents.ring_size is not None,
                rotates=options.incidents.rotates,
            )
        self.writer.loop_fact(0, "world", "", {"size": framework.world()})
        self._closed = False
        kernels.borrow_threads(framework.openmp(), threads)
        self._recorder = Recorder(framework, self.writer, rank, lock, options.gather, parallel.placer)
        if parallel.placer is not None or parallel.renames:
            self.writer.arrange(parallel.mesh, parallel.renames)
        self.incidents = Incidents(options.incidents, self.writer, partial(_broken, framework, tree))
        self._recorder.compares_gradients = "step_grad" in selection.kinds
        self._recorder.alarm = self.incidents.alarm if options.incidents.needs_alarm else None
        self.destination = Destination(
            self._recorder.record,
            self._recorder.slots,
            self._recorder.quickest_take(),
            self._recorder.record_step_gradient,
            self._recorder.forget,
            self._recorder.code_changed,
            forward_ended=self._recorder.flush_reads,
            snapshot_begins=self._recorder.begin_snapshot,
            snapshot_ended=self._recorder.end_snapshot,
            called_with=self.writer.called,
        )
        """The destination of a watcher's tensors, without the callbacks that a tap adds."""
        self.discard_deferred = self._recorder.discard_deferred

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        slot = self._recorder.slots.find(key.micro, key.phase, site, *key[4:], keep)
        self._recorder.record(tensor, slot, key.step)

    @property
    def records(self) -> int:
        """Number of records so far."""
        return self._recorder.records

    def end_step(self, step: int, book: CoverageBook) -> None:
        self._recorder.end_step()
        self._collect_notices(book)
        if book.changed:
            book.changed = False
            self.writer.coverage(book.rows(), book.notices)
        self.writer.end_step(step)
        self.incidents.end_step(step, self._recorder.uses_device)
        self._write_notices(book)

    def _write_notices(self, book: CoverageBook) -> None:
        """Write notices about incidents at once: the process may not live much longer."""
        notices = self.incidents.take_notices()
        for text in notices:
            book.notice(text)
        if notices:
            book.changed = False
            self.writer.coverage(book.rows(), book.notices)

    def flush(self) -> None:
        self._recorder.send()
        self.writer.flush()

    def close(self, status: str, reason: str, book: CoverageBook) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._close(status, reason, book)
        except BaseException as error:
            if not isinstance(error, Exception):  # an upload may take long, and Ctrl-C ends it
                for text in self.writer.interrupt():
                    say(text)
            raise

    def _close(self, status: str, reason: str, book: CoverageBook) -> None:
        failures: list[Exception] = []  # a failed device returns nothing; earlier results are kept
        try:
            failures += _failures_of(self._recorder.send)
            failures += _failures_of(self.writer.flush)
            ended = reason or ("the recording failed" if status != "finished" else "")
            failures += _failures_of(partial(self.incidents.close, ended))
            failures += _failures_of(partial(self._write_notices, book))
        finally:  # before the writer frees memory that a device may still write into
            failures += _failures_of(self._recorder.close)
        failures += _failures_of(partial(self._write_coverage, status, book))
        if failures:
            status, reason = "failed", reason or f"{type(failures[0]).__name__}: {failures[0]}"
        failures += _failures_of(partial(self.writer.close, status, reason))
        if failures:  # the user's own exception, from a signal handler, comes first
            raise next((each for each in failures if interrupt_in(each) is not None), failures[0])

    def discard(self) -> None:
        """Close the run and delete it."""
        self.close("finished", "", CoverageBook((), (), ()))
        self.writer.delete()

    def _write_coverage(self, status: str, book: CoverageBook) -> None:
        self._collect_notices(book)
        if status == "finished" or book.changed:
            self.writer.coverage(book.rows(), book.notices)

    def _collect_notices(self, book: CoverageBook) -> None:
        while self._recorder.changed_unseen:  # one by one: the index's thread may add to it
            module = self._recorder.changed_unseen.pop()
            book.notice(
                f"{display_name(module)}: a tensor was changed without its framework knowing; its summary is right, "
                "its bytes after the change were not kept"
            )
        for text in self.writer.take_notices():
            book.notice(text)
            say(text)
        while self._recorder.read_order.notices:
            book.notice(self._recorder.read_order.notices.popleft())


def _broken(framework: Framework, tree: Tree, modules: set[str]) -> bool:
    """Return whether a parameter of one of the modules has a NaN or Inf."""
    for site in tree.sites:
        if site.name in modules:
            for _, parameter in framework.parameters(site.owner):
                found = summarize(framework.host(parameter))
                if found.nan or found.posinf or found.neginf:
                    return True
    return False


def _failures_of(task: Callable[[], None]) -> list[Exception]:
    """Run a task, and return the exception that it raised, if any, in a list."""
    try:
        task()
    except Exception as error:
        return [error]
    return []

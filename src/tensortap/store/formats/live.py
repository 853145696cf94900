"""The run of a check: records of a model that is being checked, without their tensors. It is never written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensortap.core.records import Record
from tensortap.errors import UsageError
from tensortap.store.calls import CallEntry, Calls
from tensortap.store.format import encode
from tensortap.store.index import Index
from tensortap.store.loop import LoopFact, LoopFacts
from tensortap.store.run import Run, RunSource
from tensortap.store.source import kept_location

__all__ = ["LiveRun"]

_BATCH = 1024


class _LiveSource(RunSource):
    """Records as they come, encoded in batches. Rows without a sketch have none."""

    in_memory = True

    def __init__(self, name: str, info: Mapping[str, Any], rank: int) -> None:
        super().__init__(Path(name), info, [rank])
        self.count = 0
        self.arguments = Calls()
        self.facts = LoopFacts()
        self._waiting: list[Record] = []
        self._batches: list[object] = []
        self._notices: list[str] = []
        self._finished = self._closed = False

    def append(self, record: Record) -> None:
        self._waiting.append(record)
        self.count += 1
        if len(self._waiting) >= _BATCH:
            self._encode()

    def finish(self, status: str, reason: str, notices: Sequence[str]) -> None:
        if self._closed:
            return
        self._closed = True
        self._encode()
        self._finished = status == "finished"
        self._notices = [*notices] if self._finished else [f"it stopped early: {reason}", *notices]

    def read_index(self, rank: int) -> Index:
        self._encode()
        return Index.of(self._batches, rank)

    def index(self, rank: int) -> Index:
        if rank in self._indexes and len(self._indexes[rank]) < self.count:  # records came since
            del self._indexes[rank]
        return super().index(rank)

    def view(self, record: Record) -> memoryview:
        kept_location(record)
        raise UsageError(f"{record.key}: a check keeps no tensors.")

    def finished(self) -> bool:
        return self._finished

    def notices(self) -> list[str]:
        return self._notices

    def calls(self, rank: int) -> Calls:
        return self.arguments

    def loop(self, rank: int) -> LoopFacts:
        return self.facts

    def _encode(self) -> None:
        if self._waiting:
            self._batches.append(encode(self._waiting, [record.summary.sketch.size > 0 for record in self._waiting]))
            self._waiting.clear()


class LiveRun(Run):
    """A run that grows while a model is checked.

    >>> run = LiveRun("Net, as it runs", {"framework": "torch"}, rank=0)
    >>> len(run)
    0
    """

    source: _LiveSource

    def __init__(self, name: str, info: Mapping[str, Any], rank: int) -> None:
        super().__init__(_LiveSource(name, info, rank))

    def __len__(self) -> int:
        return self.source.count

    def append(self, record: Record) -> None:
        """Add a record, in execution order."""
        self.source.append(record)

    def called(self, step: int, micro: int, module: str, call: int, arguments: Mapping[str, Any]) -> None:
        """Add the plain arguments of a call; see `RunWriter.called`."""
        self.source.arguments.add(CallEntry(step, micro, module, call, arguments))

    def loop_fact(self, step: int, fact: str, of: str, value: Mapping[str, Any]) -> None:
        """Add a loop fact; see `RankWriter.loop_fact`."""
        self.source.facts.add(LoopFact(step, fact, of, value))

    def close_with(self, status: str, reason: str, notices: Sequence[str]) -> None:
        """End the run, with notices of what could not be seen. A second call does nothing."""
        self.source.finish(status, reason, notices)

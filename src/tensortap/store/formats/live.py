"""A run that was never written: records of a model that is being checked, without tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tensortap.core.records import Record
from tensortap.store.calls import Called, Calls
from tensortap.store.format import encode
from tensortap.store.index import Index
from tensortap.store.run import Run

__all__ = ["LiveRun"]

_BATCH = 1024


class LiveRun(Run):
    """Records in memory. Rows without a sketch have none."""

    on_disk = False
    in_memory = True

    def __init__(self, name: str, info: dict[str, Any], rank: int) -> None:
        super().__init__(Path(name), info, [rank])
        self._waiting: list[Record] = []
        self._batches: list[object] = []
        self._count = 0
        self._plain = Calls()
        self._said: list[str] = []
        self._finished = False
        self._closed = False

    def __len__(self) -> int:
        return self._count

    def append(self, record: Record) -> None:
        self._waiting.append(record)
        self._count += 1
        if len(self._waiting) >= _BATCH:
            self._encode()

    def called(self, step: int, micro: int, module: str, call: int, arguments: Mapping[str, Any]) -> None:
        """As `RunWriter.called`."""
        self._plain.add(Called(step, micro, module, call, arguments))

    def calls(self, rank: int) -> Calls:
        return self._plain

    def close_with(self, status: str, reason: str, notices: Sequence[str]) -> None:
        """Nothing more will come. What the watching could not see is in `notices`. A second time does nothing."""
        if self._closed:
            return
        self._closed = True
        self._encode()
        self._finished = status == "finished"
        self._said = [*notices] if status == "finished" else [f"it stopped early: {reason}", *notices]

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def notices(self) -> list[str]:
        return self._said

    def _encode(self) -> None:
        if self._waiting:
            self._batches.append(encode(self._waiting, [record.summary.sketch.size > 0 for record in self._waiting]))
            self._waiting.clear()

    def _index(self, rank: int) -> Index:
        return self._records

    @cached_property
    def _records(self) -> Index:
        return Index.of(self._batches, self.ranks[0])

"""A run made of named arrays that lie elsewhere: the parameters of a model, as of no particular step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tensortap import dtypes
from tensortap.records import Key, Location, Record, Summary
from tensortap.store.format import SCHEMA, encode
from tensortap.store.reader import Run
from tensortap.store.table import Index

__all__ = ["ArrayRun"]

Array = npt.NDArray[Any]


class ArrayRun(Run):
    """Arrays by name, loaded when asked for. 'layers.0.fc1.weight' is the parameter `weight` of `layers.0.fc1`."""

    on_disk = False

    def __init__(
        self,
        path: Path,
        arrays: Mapping[str, Callable[[], Array]],
        info: dict[str, Any],
        summarize: Callable[[Array], Summary],
    ) -> None:
        super().__init__(path, info, [0])
        self._names = list(arrays)
        self._arrays = list(arrays.values())
        self._summarize = summarize

    @property
    def finished(self) -> bool:
        return True

    @property
    def notices(self) -> list[str]:  # nothing can be missing of what is one file
        return []

    def load(self, record: Record) -> Array:
        return self._arrays[record.tensor]()

    def bytes_of(self, record: Record) -> memoryview:
        return memoryview(np.ascontiguousarray(self.load(record)).view(np.uint8).reshape(-1).data)

    def _index(self, rank: int) -> Index:
        return self._records

    @cached_property
    def _records(self) -> Index:
        """Built when first asked for: it takes a pass over all arrays."""
        index = Index.__new__(Index)
        index.rank, index.lost, index.missing, index.complete = 0, 0, False, True
        records = list(self._described())
        index.rows = pa.Table.from_batches([encode(records, [True] * len(records))] if records else [], schema=SCHEMA)
        return index

    def _described(self) -> Iterator[Record]:
        for number, (name, load) in enumerate(zip(self._names, self._arrays, strict=True)):
            array = load()
            module, _, leaf = name.rpartition(".")
            yield Record(
                key=Key(0, 0, "state", module, 0, "param", leaf),
                rank=0,
                seq=number,
                cls="",
                dtype=dtypes.name_of(array.dtype),
                shape=array.shape,
                tensor=number,
                summary=self._summarize(array),
                location=Location(name, 0, array.nbytes),
            )

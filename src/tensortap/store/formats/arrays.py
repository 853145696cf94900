"""A run made of named arrays that lie elsewhere: the parameters of a model, as of no particular step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import Key, Location, Record, Summary
from tensortap.store.format import encode
from tensortap.store.index import Index
from tensortap.store.run import Run
from tensortap.store.source import Spans

__all__ = ["WRAPPERS", "ArrayRun"]

Array = npt.NDArray[Any]
WRAPPERS = ("state_dict", "model", "model_state_dict", "module")
"""Keys under which training scripts put a state dict beside other things. They are no part of the tensors' names."""


class _Bytes(Spans):
    """The arrays' bytes, for all that asks for spans of a file."""

    def __init__(self, path: Path, arrays: Sequence[Callable[[], Array]]) -> None:
        super().__init__(path)
        self._arrays = arrays

    def view(self, record: Record) -> memoryview:
        return np.ascontiguousarray(self._arrays[record.tensor]()).reshape(-1).view(np.uint8).data.toreadonly()

    def read(self, record: Record) -> memoryview:
        return memoryview(bytearray(self.view(record))).toreadonly()


class ArrayRun(Run):
    """Arrays by name, loaded when asked for. 'layers.0.fc1.weight' is the parameter `weight` of `layers.0.fc1`."""

    on_disk = False
    is_checkpoint = True

    def __init__(
        self,
        path: Path,
        arrays: Mapping[str, Callable[[], Array]],
        info: dict[str, Any],
        summarize: Callable[[Array], Summary],
        notices: Sequence[str] = (),
    ) -> None:
        super().__init__(path, info, [0])
        self._names = list(arrays)
        self._arrays = list(arrays.values())
        self._spans = _Bytes(path, self._arrays)
        self._summarize = summarize
        self._said = list(notices)

    @property
    def finished(self) -> bool:
        return True

    @property
    def notices(self) -> list[str]:
        return self._said

    def load(self, record: Record) -> Array:
        return self._arrays[record.tensor]()

    def _index(self, rank: int) -> Index:
        return self._records

    @cached_property
    def _records(self) -> Index:
        """Built when first asked for: it takes a pass over all arrays."""
        records = list(self._described())
        return Index.of([encode(records, [True] * len(records))] if records else [], rank=0)

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

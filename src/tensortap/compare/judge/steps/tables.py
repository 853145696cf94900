"""Tables over all steps of a run, of which each step has its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

from tensortap.compare.judge.steps.structure import StepStructure

__all__ = ["ByStep"]

_KeyT = TypeVar("_KeyT")
_ValueT = TypeVar("_ValueT")
_DefaultT = TypeVar("_DefaultT")


class ByStep(Generic[_KeyT, _ValueT]):
    """A table of all steps, looked up in that of a key's own step."""

    def __init__(
        self,
        steps: Callable[[], Iterator[StepStructure]],
        step_at: Callable[[int, int], StepStructure | None],
        step_of: Callable[[_KeyT], StepStructure | None],
        table_of: Callable[[StepStructure], Mapping[_KeyT, _ValueT]],
    ) -> None:
        self._steps, self._step_at, self._step_of, self._table_of = steps, step_at, step_of, table_of

    def __contains__(self, key: _KeyT) -> bool:
        step = self._step_of(key)
        return step is not None and key in self._table_of(step)

    @overload
    def get(self, key: _KeyT) -> _ValueT | None: ...
    @overload
    def get(self, key: _KeyT, default: _ValueT | _DefaultT) -> _ValueT | _DefaultT: ...
    def get(self, key: _KeyT, default: Any = None) -> Any:
        step = self._step_of(key)
        return default if step is None else self._table_of(step).get(key, default)

    def items(self) -> Iterator[tuple[_KeyT, _ValueT]]:
        for step in self._steps():
            yield from self._table_of(step).items()

    def items_in(self, rank: int, step: int) -> Iterable[tuple[_KeyT, _ValueT]]:
        """Return the items of the table of one step, which may have others, too."""
        found = self._step_at(rank, step)
        return () if found is None else self._table_of(found).items()

    def values(self) -> Iterator[_ValueT]:
        return (value for _, value in self.items())

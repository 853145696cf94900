"""Choices of experts in a check: compared while the tensors of both sides are at hand.

A router takes the experts with the best scores. In a check, the code that chooses sees either scores that the same call
has just computed, or the reference's, cast to the dtype of the model's own. Where rounding decides between two, the
choice of a token changes, and with it all that the token makes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from tensortap.compare.measure.choices import (
    ChangedChoice,
    better_explained,
    changed_choice,
    changed_codes,
    error_without_tokens,
    holds_scores,
)
from tensortap.core.records import Key

__all__ = ["LiveChoiceReader", "LiveChoices"]

Array = npt.NDArray[Any]
_MOST_SCORES, _RECENT = 1024, 16
"""The largest last dimension of scores, and how many tensors of that kind are kept."""


class _Seen(NamedTuple):
    key: Key
    row: int
    ours: Array
    theirs: Array


class LiveChoices:
    """Looks for changed choices among the tensors of a forward pass, and measures others without their tokens."""

    def __init__(self) -> None:
        self.changed: dict[int, ChangedChoice] = {}
        """Row of a choice that differs → how it does."""
        self.without: dict[int, float] = {}
        """Row → its relative error without the tokens whose choice changed."""
        self._recent: deque[_Seen] = deque(maxlen=_RECENT)
        self._micro: tuple[int, int] | None = None
        self._current: list[ChangedChoice] = []
        """The changed choices of the current micro step."""

    def see(self, row: int, key: Key, theirs: Array, reference: Callable[[], Array], equal: bool) -> None:
        """Take part in a measurement. `reference` returns the recorded tensor; it is read only if needed."""
        if self._micro != key[:2]:
            self._micro = key[:2]
            self._recent.clear()
            self._current.clear()
        if key.phase == "forward" and theirs.dtype.kind in "iu":
            if not equal and theirs.ndim and theirs.size:
                self._compare(row, key, reference(), theirs)
            return
        if key.phase == "forward" and theirs.ndim >= 2 and theirs.shape[-1] <= _MOST_SCORES and theirs.size:
            self._recent.append(_Seen(key, row, theirs if equal else reference(), theirs))
        if not equal:
            self._measure(row, theirs, reference)

    def _compare(self, row: int, key: Key, ours: Array, theirs: Array) -> None:
        found: ChangedChoice | None = None
        for seen in self._recent:
            if not holds_scores(seen.ours.shape, ours.shape):
                continue
            own = seen.key.kind == key.kind == "output" and seen.key[3:5] == key[3:5]
            used = seen.theirs if own else seen.ours.astype(seen.theirs.dtype)
            found = better_explained(found, changed_choice((ours, theirs), (seen.ours, used)))
        if found is None and key.kind == "output" and 1 < max(ours.max(), theirs.max()) < ours.size:
            found = changed_codes(ours, theirs)
        if found is None:
            return
        self.changed[row] = found
        self._current.append(found)
        for seen in self._recent:
            self._measure(seen.row, seen.theirs, lambda seen=seen: seen.ours)  # type: ignore[misc]

    def _measure(self, row: int, theirs: Array, reference: Callable[[], Array]) -> None:
        for choice in self._current:
            if (error := error_without_tokens(choice, theirs.shape, lambda: (reference(), theirs))) is not None:
                self.without[row] = max(error, self.without.get(row, 0.0))


class LiveChoiceReader:
    """The choices of a check, by pair; see `choices.ChoiceReader`."""

    def __init__(self, choices: LiveChoices, rows: Sequence[int]) -> None:
        self._changed: Mapping[int, ChangedChoice] = choices.changed
        self._without: Mapping[int, float] = choices.without
        self._rows = rows

    def may_be_choice(self, pair: int) -> bool:
        return self._rows[pair] in self._changed

    def knows_tokens(self, pair: int) -> bool:
        return True

    def compare(self, pair: int, scores: Sequence[int]) -> ChangedChoice | None:
        found = self._changed.get(self._rows[pair])
        return None if found is None or found.of_codes else found

    def may_be_code(self, pair: int) -> bool:
        return self.compare_codes(pair) is not None

    def compare_codes(self, pair: int) -> ChangedChoice | None:
        found = self._changed.get(self._rows[pair])
        return found if found is not None and found.of_codes else None

    def compare_routed(self, experts: Mapping[int, int], scores: int, given: Sequence[int]) -> ChangedChoice | None:
        return None  # the scores are the reference's

    def error_without(self, pair: int, choice: ChangedChoice) -> float | None:
        return self._without.get(self._rows[pair])

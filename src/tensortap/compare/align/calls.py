"""Calls of a module with different plain arguments in the candidate. They are reported, never judged."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Ints, Names, Side
from tensortap.compare.say.arguments import describe_other_arguments
from tensortap.core.arguments import ABSENT, TENSOR, ArgumentDifference, OpaqueValue, read
from tensortap.core.records import STATE_KINDS, Key, display_name
from tensortap.store.calls import Calls

__all__ = ["CallDifferences", "argument_notes"]

ArgumentDifferences = tuple[ArgumentDifference, ...]

_FEW = 3


class _CallSpot(NamedTuple):
    """The position of a call on its own side."""

    rank: int
    step: int
    micro: int
    module: str
    number: int


@dataclass(frozen=True)
class _PairedSide:
    """One side of all pairs."""

    side: Side
    rows: Ints

    @cached_property
    def modules(self) -> Names:
        return self.side.names("module")

    @cached_property
    def known(self) -> bool:
        """Whether plain arguments were recorded."""
        return all(self.side.run.calls(rank) is not None for rank in self.side.ranks)

    @cached_property
    def places(self) -> Ints:
        """A number for each pair that is different for different ranks and modules."""
        return self.side.rank[self.rows] * len(self.modules.words) + self.modules.codes[self.rows]

    def history(self, call: _CallSpot) -> Sequence[Any]:
        """Return the plain arguments of the module from its first call to its last."""
        return self._calls(call).of_module(call.module)

    def call(self, pair: int) -> _CallSpot:
        row, side = int(self.rows[pair]), self.side
        return _CallSpot(
            int(side.rank[row]), int(side.step[row]), int(side.micro[row]), self.modules[row], int(side.call[row])
        )

    def arguments(self, call: _CallSpot) -> Mapping[str, Any]:
        return self._calls(call).of(*call[1:])

    def _calls(self, call: _CallSpot) -> Calls:
        calls = self.side.run.calls(call.rank)
        assert calls is not None, "only asked if they are known"
        return calls

    def value(self, call: _CallSpot, path: str, given: Mapping[str, Any]) -> Any:
        """Return the argument at a path: a plain value, TENSOR if one was recorded there, else ABSENT."""
        if path in given:
            return given[path]
        key = Key(call.step, call.micro, "forward", call.module, call.number, "input", path)
        return ABSENT if self.side.run.get(key, call.rank) is None else TENSOR


class CallDifferences:
    """Differences in the plain arguments of the calls that two runs have in common. If names are `mapped`, those of
    arguments may differ by design: then only arguments of both sides count."""

    def __init__(self, reference: Side, candidate: Side, alignment: Alignment, mapped: bool) -> None:
        self._left, self._right = (
            _PairedSide(reference, alignment.reference),
            _PairedSide(candidate, alignment.candidate),
        )
        self._mapped = mapped

    def of(self, pair: int) -> ArgumentDifferences:
        """Return the arguments in which the two calls of a pair differ."""
        if not (self._left.known and self._right.known) or self._left.side.phase[int(self._left.rows[pair])] == "eval":
            return ()
        here, there = self._left.call(pair), self._right.call(pair)
        ours, theirs = self._left.arguments(here), self._right.arguments(there)
        return () if repr(ours) == repr(theirs) else tuple(self._others(here, there, read(ours), read(theirs)))

    @cached_property
    def first_of_modules(self) -> dict[str, tuple[int, ArgumentDifferences]]:
        """By module, in the reference's names: the step of the first call that differs, on the first rank where one
        does, and the differences."""
        found: dict[str, tuple[int, ArgumentDifferences]] = {}
        for module, pairs in self._suspects() if self._left.known and self._right.known else ():
            differing = ((self._left.call(pair).step, others) for pair in pairs if (others := self.of(pair)))
            if module not in found and (first := next(differing, None)) is not None:
                found[module] = first
        return found

    def _suspects(self) -> Iterator[tuple[str, list[int]]]:
        """Yield modules whose arguments differ in any call, with at least one pair of each call."""
        left, right = self._left, self._right
        # Most modules get no plain arguments, and most others the same ones: these are skipped as a whole.
        whole = left.places * (int(right.places.max(initial=0)) + 1) + right.places
        _, first, places = np.unique(whole, return_index=True, return_inverse=True)
        in_step = np.array_equal(left.side.step[left.rows], right.side.step[right.rows])
        for place in np.argsort(first).tolist():
            here, there = left.call(int(first[place])), right.call(int(first[place]))
            ours, theirs = left.history(here), right.history(there)
            if not (ours or theirs) or (in_step and repr(ours) == repr(theirs)):
                continue
            pairs = np.flatnonzero(places.reshape(-1) == place)
            kinds = np.array([word not in STATE_KINDS for word in left.side.kind.words], bool)
            pairs = pairs[kinds[left.side.kind.codes[left.rows[pairs]]]]
            pairs = pairs[~left.side.phase.among(("eval",))[left.rows[pairs]]]
            rows = left.rows[pairs]
            calls = np.stack([column[rows] for column in (left.side.step, left.side.micro, left.side.call)])
            yield here.module, pairs[np.any(np.diff(calls, axis=1, prepend=-1), axis=0)].tolist()

    def _others(
        self, here: _CallSpot, there: _CallSpot, ours: Mapping[str, Any], theirs: Mapping[str, Any]
    ) -> Iterator[ArgumentDifference]:
        renamed = _given_by_position_and_name(ours, theirs)
        for path in dict.fromkeys([*ours, *theirs]):
            left, right = self._left.value(here, path, ours), self._right.value(there, path, theirs)
            if repr(left) == repr(right) or path in renamed or _is_insignificant(left, right):
                continue
            if not (self._mapped and (left is ABSENT or right is ABSENT)):
                yield ArgumentDifference(path, left, right)


def _given_by_position_and_name(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> set[str]:
    """Return the paths of arguments that one side was given by position and the other by name."""
    found: set[str] = set()
    for path in [each for each in ours if each not in theirs]:
        alike = (
            other
            for other in theirs
            if other not in ours
            and other not in found
            and other.isdecimal() != path.isdecimal()
            and repr(theirs[other]) == repr(ours[path])
        )
        if (other := next(alike, None)) is not None:
            found |= {path, other}
    return found


def _is_insignificant(left: Any, right: Any) -> bool:
    """Whether a difference means little: None against the default, or two devices, which often differ on purpose."""
    both = (left, right)
    if any(value is ABSENT for value in both) and any(value is None for value in both):
        return True
    return all(isinstance(value, OpaqueValue) and value.kind == "device" for value in both)


def argument_notes(found: Mapping[str, tuple[int, ArgumentDifferences]], said: Collection[str]) -> list[str]:
    """Return notes about modules that were called differently, grouped by difference, without those `said` already."""
    alike: dict[str, list[tuple[str, int]]] = {}
    for module, (step, others) in found.items():
        if module not in said:
            alike.setdefault(describe_other_arguments(others), []).append((display_name(module), step))
    lines = []
    for words, modules in list(alike.items())[:_FEW]:
        names = ", ".join(name for name, _ in modules[:_FEW])
        names += f" and {len(modules) - _FEW} more" if len(modules) > _FEW else ""
        was, step = "were" if len(modules) > 1 else "was", min(step for _, step in modules)
        lines.append(f"other plain arguments: {names} {was} called with {words} (step {step})")
    rest = sum(map(len, list(alike.values())[_FEW:]))
    return lines + ([f"other plain arguments: {rest} more module{'s' * (rest > 1)}"] if rest else [])

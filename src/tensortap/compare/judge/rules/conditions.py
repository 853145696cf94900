"""Conditions of tolerance rules that depend on the kind of a record, so that few rules are asked about each pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensortap.compare.judge.rules.evidence import JudgedPair

__all__ = ["KindIs", "is_of"]


@dataclass(frozen=True)
class KindIs:
    """The condition that a pair is of one of these kinds, and maybe a further one."""

    kinds: tuple[str, ...]
    further: Callable[[JudgedPair], bool] | None = None

    def __call__(self, pair: JudgedPair) -> bool:
        return pair.kind in self.kinds and (self.further is None or self.further(pair))


def is_of(*kinds: str, further: Callable[[JudgedPair], bool] | None = None) -> Callable[[JudgedPair], bool]:
    return KindIs(kinds, further)

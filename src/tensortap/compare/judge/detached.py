"""Values of the candidate that autograd does not reach, from its loop facts: a gradient that never comes was cut off
there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tensortap.compare.align.side import Side
from tensortap.compare.matched import Matched
from tensortap.core.records import Key

__all__ = ["DetachedKeys", "detached_paths", "knows_detached", "notes_detached"]


def knows_detached(matched: Matched) -> bool:
    """Whether the candidate noted such values."""
    return matched.plan is None and notes_detached(matched.candidate)


def notes_detached(side: Side) -> bool:
    """Whether a run noted such values."""
    return any("detached" in side.run.loop(rank).names() for rank in side.ranks)


def detached_paths(side: Side, ranks: Iterable[int], step: int, module: str, *lists: str) -> set[str]:
    """Return the paths in some of the lists that a run noted of a module in a step."""
    facts = [side.run.loop(rank).value("detached", step, module) for rank in ranks]
    return {path for fact in facts if fact is not None for name in lists for path in _strings(fact.get(name))}


@dataclass(frozen=True)
class DetachedKeys:
    """The identities of such values in the reference's names, on any rank. Only `in` is supported.

    lists: by kind of record, the name of the list in the fact.
    """

    matched: Matched
    lists: Mapping[str, str]

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, Key) or key.kind not in self.lists:
            return False
        module = self._modules.get(key.module)
        return module is not None and key.path in self._paths(key.step, module, self.lists[key.kind])

    def _paths(self, step: int, module: str, name: str) -> set[str]:
        side = self.matched.candidate
        return detached_paths(side, side.ranks, self._steps.get(step, step), module, name)

    @cached_property
    def _modules(self) -> dict[str, str]:
        """The candidate's names of the reference's modules that ran on both sides."""
        left, right, alignment = self.matched.reference, self.matched.candidate, self.matched.alignment
        codes = np.stack([left.module.codes[alignment.reference], right.module.codes[alignment.candidate]])
        pairs = np.unique(codes, axis=1).T.tolist() if codes.size else []
        return {left.module.words[ours]: right.module.words[theirs] for ours, theirs in pairs}

    @cached_property
    def _steps(self) -> dict[int, int]:
        left, right, alignment = self.matched.reference, self.matched.candidate, self.matched.alignment
        columns = left.step[alignment.reference].tolist(), right.step[alignment.candidate].tolist()
        return dict(zip(*columns, strict=True))


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []

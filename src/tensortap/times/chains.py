"""From the owners that a sweep finds to chains of places: which modules enclose each of them in its phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tensortap.times.ledger import Place
from tensortap.times.marks import ANNOTATING, NO_MODULE, PHASES, Kind, Meaning
from tensortap.times.sweep import NOBODY, Owner

__all__ = ["Chain", "Chains"]

Chain = tuple[Place, ...]
_Context = tuple[int, ...]
"""For each phase the number of the chain that is open in it, or NOBODY."""

_OUTSIDE: _Context = (NOBODY,) * len(PHASES)


@dataclass
class Chains:
    """Numbers all chains of places, so that amounts can be summed in arrays."""

    all: list[Chain] = field(default_factory=list)
    calls: Counter[Place] = field(default_factory=Counter)
    _numbers: dict[Chain, int] = field(default_factory=dict)
    _places: dict[int, Place] = field(default_factory=dict)
    _steps: dict[tuple[_Context, int], tuple[_Context, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nobody = self.number((Place(NO_MODULE, "", "other"),))
        self.nobody_backward = self.number((Place(NO_MODULE, "", "backward"),))
        self.annotating = self.number((Place(ANNOTATING, "tensortap", "other"),))

    def number(self, chain: Chain) -> int:
        found = self._numbers.get(chain)
        if found is None:
            found = self._numbers[chain] = len(self.all)
            self.all.append(chain)
        return found

    def of(self, owners: Sequence[Owner]) -> list[int]:
        """The number of each owner's chain. An owner comes after the one that encloses it."""
        contexts: list[_Context] = []
        numbers: list[int] = []
        for owner in owners:
            context = contexts[owner.parent] if owner.parent != NOBODY else _OUTSIDE
            number = self.nobody_backward
            if owner.meaning.kind in (Kind.MODULE, Kind.NAMED):
                context, number = self._step(context, owner.meaning)
                self.calls[self._place(owner.meaning)] += 1
            elif owner.makers:
                number = self.number(tuple(self._place(maker) for maker in owner.makers))
            elif owner.parent != NOBODY and _is_backward(owners[owner.parent]):
                number = numbers[owner.parent]  # a node of its own, inside one of checkpointing
            contexts.append(context)
            numbers.append(number)
        made_by = [owner.inside if owner.inside != NOBODY else own for own, owner in enumerate(owners)]
        return [numbers[maker] for maker in made_by]

    def count(self, meaning: Meaning) -> None:
        """Count a call that has no span of its own."""
        self.calls[self._place(meaning)] += 1

    def _step(self, context: _Context, meaning: Meaning) -> tuple[_Context, int]:
        """The context inside a span, and the span's own chain. There are few of them, and many spans."""
        key = context, id(meaning)
        found = self._steps.get(key)
        if found is None:
            phase = PHASES.index(meaning.phase)
            outer = self.all[context[phase]] if context[phase] != NOBODY else ()
            number = self.number((*outer, self._place(meaning)))
            found = self._steps[key] = ((*context[:phase], number, *context[phase + 1 :]), number)
        return found

    def _place(self, meaning: Meaning) -> Place:
        place = self._places.get(id(meaning))
        if place is None:
            place = self._places[id(meaning)] = Place(meaning.module, meaning.cls, meaning.phase)
        return place


def _is_backward(owner: Owner) -> bool:
    return owner.meaning.kind is Kind.MODULE and owner.meaning.phase == "backward"

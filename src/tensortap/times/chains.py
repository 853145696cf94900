"""Chains of nested modules: for each owner that a sweep finds, the modules that enclose it in its phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tensortap.times.ledger import ModulePhase
from tensortap.times.marks import ANNOTATING, NO_MODULE, PHASES, SpanKind, SpanMeaning
from tensortap.times.sweep import NO_OWNER, Owner

__all__ = ["Chain", "Chains"]

Chain = tuple[ModulePhase, ...]
_Context = tuple[int, ...]
"""For each phase, the number of the chain that is open in it, or NO_OWNER."""

_OUTSIDE: _Context = (NO_OWNER,) * len(PHASES)


@dataclass
class Chains:
    """All chains, numbered so that amounts can be summed in arrays."""

    all: list[Chain] = field(default_factory=list)
    calls: Counter[ModulePhase] = field(default_factory=Counter)
    _numbers: dict[Chain, int] = field(default_factory=dict)
    _places: dict[int, ModulePhase] = field(default_factory=dict)
    _steps: dict[tuple[_Context, int], tuple[_Context, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.no_module = self.number((ModulePhase(NO_MODULE, "", "other"),))
        self.no_module_backward = self.number((ModulePhase(NO_MODULE, "", "backward"),))
        self.annotating = self.number((ModulePhase(ANNOTATING, "tensortap", "other"),))

    def number(self, chain: Chain) -> int:
        found = self._numbers.get(chain)
        if found is None:
            found = self._numbers[chain] = len(self.all)
            self.all.append(chain)
        return found

    def number_owners(self, owners: Sequence[Owner]) -> list[int]:
        """Return the number of each owner's chain. An owner comes after the one that encloses it."""
        contexts: list[_Context] = []
        numbers: list[int] = []
        for owner in owners:
            context = contexts[owner.parent] if owner.parent != NO_OWNER else _OUTSIDE
            number = self.no_module_backward
            if owner.meaning.kind in (SpanKind.MODULE, SpanKind.NAMED):
                context, number = self._step(context, owner.meaning)
                self.calls[self._place(owner.meaning)] += 1
            elif owner.makers:
                number = self.number(tuple(self._place(maker) for maker in owner.makers))
            elif owner.parent != NO_OWNER and _is_backward(owners[owner.parent]):
                number = numbers[owner.parent]  # reentrant checkpointing runs this node inside another node
            contexts.append(context)
            numbers.append(number)
        made_by = [owner.inside if owner.inside != NO_OWNER else own for own, owner in enumerate(owners)]
        return [numbers[maker] for maker in made_by]

    def count(self, meaning: SpanMeaning) -> None:
        """Count a call that has no span."""
        self.calls[self._place(meaning)] += 1

    def _step(self, context: _Context, meaning: SpanMeaning) -> tuple[_Context, int]:
        """Return the context inside a span, and the span's chain. Cached: many spans share few contexts."""
        key = context, id(meaning)
        found = self._steps.get(key)
        if found is None:
            phase = PHASES.index(meaning.phase)
            outer = self.all[context[phase]] if context[phase] != NO_OWNER else ()
            number = self.number((*outer, self._place(meaning)))
            found = self._steps[key] = ((*context[:phase], number, *context[phase + 1 :]), number)
        return found

    def _place(self, meaning: SpanMeaning) -> ModulePhase:
        place = self._places.get(id(meaning))
        if place is None:
            place = self._places[id(meaning)] = ModulePhase(meaning.module, meaning.cls, meaning.phase)
        return place


def _is_backward(owner: Owner) -> bool:
    return owner.meaning.kind is SpanKind.MODULE and owner.meaning.phase == "backward"

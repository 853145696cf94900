"""Tells another implementation of attention from a mistake, where one side is less exact within tolerance.

Attention has several right implementations, which round at other places: eager attention rounds scores and shares,
fused attention neither of them, and blocks of keys round shares before they are normalised. The one that rounds more is
not at fault. Three facts set a mistake apart, such as a softmax that is not upcast:

- An implementation is chosen for all modules of a class. A mistake may be in one of them.
- A mistake makes gradients at least as much less exact as values: backward reads the same rounded shares again. Fused
  attention computes most of its backward as eager attention does, so that against it values are further off than
  gradients: 1.3 to 2.4 times against 1.1 to 2.0 times, in five models with eager attention instead of fused.
- Blocks of keys are as exact as eager attention in their values, but not bit for bit alike, and up to 1.3 times as far
  in their gradients; so is fused attention, up to 1.6 times, beside one in float32. A mistake in backward alone leaves
  the values as they were, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tensortap.compare.judge.findings import FindingBuilder
from tensortap.core.records import TruthErrors

__all__ = ["Implementations", "Limits"]

_ATTENTION = re.compile(r"att|mha|msa", re.IGNORECASE)
_DIFFERS = 0.5
"""Two implementations are this many times their error apart, at least: they round independently."""
_LESS_EXACT = 1.05
"""Ratio from which on the values of a class of modules, all calls together, are less exact."""
_MOST_OF_VALUES, _MOST_OF_GRADIENTS = 2.6, 2.0
"""Ratio up to which another implementation explains values, or gradients beside values that are as exact."""


@dataclass(frozen=True)
class Limits:
    """The ratios from which on a class of modules counts as less exact by mistake."""

    values: float
    gradients: float
    known: bool = True
    """Whether gradients were measured, too. If not, another implementation and a mistake look the same."""


@dataclass
class _Evidence:
    """Squared errors of both sides for the modules of one class; of gradients by record."""

    modules: set[str] = field(default_factory=set)
    values: list[float] = field(default_factory=lambda: [0.0, 0.0])
    gradients: dict[tuple[str, str], list[float]] = field(default_factory=dict)


class Implementations:
    """Modules that seem to be another implementation of attention, by class."""

    def __init__(self, builder: FindingBuilder) -> None:
        self._builder = builder
        self._found: dict[str, _Evidence] = {}

    def is_attention(self, module: str) -> bool:
        """Whether a module is an attention, by its name or class."""
        names = module.rpartition(".")[2], self.class_of(module)
        return any(_ATTENTION.search(name) for name in names)

    def class_of(self, module: str) -> str:
        """Return the class of a module."""
        return self._classes.get(module, "")

    def differs(self, pair: int, errors: TruthErrors) -> bool:
        """Whether the sides are as far apart as two implementations are."""
        difference = self._builder.difference_of(pair)
        return difference is not None and difference.rel_l2 >= _DIFFERS * min(errors.reference, errors.candidate)

    def add(self, module: str, pair: int, errors: TruthErrors) -> None:
        """Take the errors of a record that the code of an attention has made, and in which the sides differ."""
        structure = self._builder.structure
        evidence = self._found.setdefault(self.class_of(module), _Evidence())
        kind = structure.kind[pair]
        if kind in ("input", "output"):
            evidence.modules.add(module)
            sums = evidence.values
        elif kind in ("grad_input", "grad_output"):
            name = structure.module[pair].rpartition(".")[2]
            sums = evidence.gradients.setdefault((name, structure.path[pair]), [0.0, 0.0])
        else:
            return
        sums[0] += errors.reference**2
        sums[1] += errors.candidate**2

    def limits(self, module: str) -> Limits | None:
        """Return the limits of a module that seems to be another implementation; None if it does not."""
        evidence = self._found.get(self.class_of(module))
        if evidence is None or self.modules_like(module) - evidence.modules:
            return None
        values = _ratio(evidence.values)
        gradients = max((_ratio(each) for each in evidence.gradients.values()), default=None)
        if gradients is None:
            return Limits(_MOST_OF_VALUES, _MOST_OF_VALUES, known=False)
        if values < _LESS_EXACT:
            return Limits(_MOST_OF_VALUES, _MOST_OF_GRADIENTS)
        return Limits(_MOST_OF_VALUES, _MOST_OF_VALUES) if gradients < values else None

    def modules_like(self, module: str) -> set[str]:
        """Return all modules of the same class."""
        cls = self.class_of(module)
        return {name for name, other in self._classes.items() if other == cls}

    def first_like(self, pair: int, module: str) -> int:
        """Return the same record of the first module of the same class, in the same pass."""
        structure = self._builder.structure
        inside, path = structure.module[pair][len(module) :], structure.path[pair]
        for other, cls in self._classes.items():  # in the order of their calls
            calls = structure.calls_of_module.get((structure.scope[pair], other + inside), ())
            rows = [row for call in calls[:1] for row in call.of(structure.kind[pair]) if structure.path[row] == path]
            if cls == self.class_of(module) and rows:
                return rows[0]
        return pair

    @cached_property
    def _classes(self) -> Mapping[str, str]:
        """Module → its class, of the modules that were called."""
        structure = self._builder.structure
        rows: dict[str, int] = {}
        for row, (module, kind) in enumerate(zip(structure.module, structure.kind, strict=True)):
            if kind in ("input", "output"):
                rows.setdefault(module, row)
        return {module: self._builder.class_of(row) for module, row in rows.items()}


def _ratio(sums: Collection[float]) -> float:
    reference, candidate = sums
    return float((candidate / reference) ** 0.5) if reference else float("inf")

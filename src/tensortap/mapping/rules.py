"""The rules themselves, as plain data: which names, classes and layouts of one side belong to which of the other.

A rule names its two sides by their frameworks, `torch` and `paddle`, or by their part in a comparison, `reference` and
`candidate`; in a transfer the source is the reference. It holds in both directions. `rules_file` reads them from TOML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tensortap.mapping.layouts import inverse
from tensortap.mapping.patterns import matches

__all__ = [
    "FIRST",
    "SIDES",
    "ClassRule",
    "Ignore",
    "ModuleRule",
    "Rules",
    "Sides",
    "TensorRule",
    "ValueRule",
    "permute_to",
    "side_of",
]

T = TypeVar("T")

SIDES = (("torch", "paddle"), ("reference", "candidate"))
FIRST = ("torch", "reference")
"""A permutation is of the axes of this side: the other side's tensor is this one's with its axes in that order."""


@dataclass(frozen=True)
class Sides:
    """What rules may call the two trees that are matched: `made` is the one whose terms count, `given` the other."""

    made: tuple[str, ...]
    given: tuple[str, ...]


def side_of(names: Mapping[str, T], labels: Sequence[str]) -> T | None:
    """What a rule says of one side; None if it is about others."""
    return next((names[label] for label in labels if label in names), None)


def _chained(first: Sequence[int], then: Sequence[int]) -> tuple[int, ...]:
    """One permutation after the other; an empty one changes nothing."""
    return tuple(first[axis] for axis in then) if first and then else tuple(first or then)


@dataclass(frozen=True)
class ModuleRule:
    """Modules of the one side and of the other that are the same."""

    names: Mapping[str, str]
    regex: str = ""
    """The side whose name is a regular expression, which the other's is made from; empty if both are patterns."""
    where: str = ""


@dataclass(frozen=True)
class TensorRule:
    """A parameter or buffer, and how it lies; one of one side may be several of the other."""

    names: Mapping[str, tuple[str, ...]]
    permute: tuple[int, ...] = ()
    axis: int = 0
    bessel: bool = False
    """The first side's is divided by n - 1, the other's by n: they differ by design."""
    where: str = ""


@dataclass(frozen=True)
class ValueRule:
    """Something that goes in or comes out: 'KIND PATH' within a class, 'MODULE KIND PATH' else."""

    names: Mapping[str, str]
    permute: tuple[int, ...] = ()
    where: str = ""


def permute_to(rule: TensorRule | ValueRule, made: Sequence[str]) -> tuple[int, ...]:
    """The axes of the other side's tensor in the order of this side's."""
    first = any(label in FIRST for label in made if label in rule.names)
    return inverse(rule.permute) if first else rule.permute


@dataclass(frozen=True)
class Ignore:
    """What one side has and the other has no counterpart for, by design."""

    side: str
    pattern: str
    why: str
    where: str = ""


@dataclass(frozen=True)
class ClassRule:
    """Classes that do the same, and what their tensors are called. `*` stands for any class that has those tensors."""

    names: Mapping[str, tuple[str, ...]]
    tensors: tuple[TensorRule, ...] = ()
    values: tuple[ValueRule, ...] = ()
    ignores: tuple[Ignore, ...] = ()
    whole: bool = False
    """What hangs below such a module is its own affair, and need not agree."""
    like: str = ""
    """The class that these are variants of: they do the same, and differ in the layout of their tensors."""
    where: str = ""

    def permute_of(self, labels: Sequence[str], tensor: str) -> tuple[int, ...]:
        """The permutation that the rule has for a tensor that a side calls so."""
        return next((t.permute for t in self.tensors if side_of(t.names, labels) == (tensor,)), ())

    def names_class(self, labels: Sequence[str], classes: Sequence[str]) -> bool:
        """Whether a class, or one that it inherits from, is among those that a side lists; a lone `*` lists none."""
        words = [word for word in side_of(self.names, labels) or () if word != "*"]
        return any(matches(word, cls) for cls in classes for word in words)


@dataclass(frozen=True)
class Rules:
    """A table of rules. Earlier ones win."""

    modules: tuple[ModuleRule, ...] = ()
    classes: tuple[ClassRule, ...] = ()
    tensors: tuple[TensorRule, ...] = ()
    values: tuple[ValueRule, ...] = ()
    ignores: tuple[Ignore, ...] = ()
    structure: bool = True
    """Whether modules that no name and no rule places may be placed by the structure of the trees."""
    source: str = ""
    _canon: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict, repr=False, compare=False)

    def __add__(self, other: Rules) -> Rules:
        return Rules(
            modules=self.modules + other.modules,
            classes=self.classes + other.classes,
            tensors=self.tensors + other.tensors,
            values=self.values + other.values,
            ignores=self.ignores + other.ignores,
            structure=self.structure and other.structure,
            source=self.source or other.source,
        )

    def canonical(self, labels: Sequence[str], classes: tuple[str, ...]) -> str:
        """One word for a class and for its counterparts: BatchNorm2d and BatchNorm2D, ModuleList and LayerList."""
        key = (labels[0], classes)
        if key not in self._canon:
            rule = next((rule for rule in self.classes if rule.names_class(labels, classes)), None)
            word = classes[-1] if rule is None else rule.like or next(iter(rule.names.values()))[0]
            self._canon[key] = word.lower()
        return self._canon[key]

    def to_first(self, labels: Sequence[str], classes: Sequence[str], tensor: str) -> tuple[int, ...]:
        """The axes of a class's tensor in the order in which the first side's usual class has them; empty if they lie
        so already, or nothing is known of the class."""
        rule = next((rule for rule in self.classes if rule.names_class(labels, classes)), None)
        if rule is None:
            return ()
        if rule.like:
            usual = next((each for each in self.classes if each.names_class(FIRST, (rule.like,))), None)
            own, others = rule.permute_of(labels, tensor), () if usual is None else usual.permute_of(FIRST, tensor)
            if labels[0] in FIRST:  # into the other side's layout, and from there into the usual one
                return _chained(own, inverse(others))
        return inverse(rule.permute_of(labels, tensor)) if labels[0] not in FIRST else ()

    def outputs_axis(self, labels: Sequence[str], classes: Sequence[str]) -> int | None:
        """The axis of a Linear's weight along which its outputs lie; None if the class is not known as one."""
        if self.canonical(labels, tuple(classes)) != "linear":
            return None
        turn = self.to_first(labels, classes, "weight")
        return turn[0] if turn else 0

    def opaque(self, labels: Sequence[str], classes: Sequence[str]) -> bool:
        """Whether a class is known as a whole, so that what hangs below it need not agree."""
        return any(rule.whole for rule in self.classes if rule.names_class(labels, classes))

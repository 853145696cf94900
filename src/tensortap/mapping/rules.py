"""Mapping rules as plain data: which names, classes and layouts of the two sides correspond.

A rule names its sides by framework, `torch` and `paddle`, or by role, `reference` and `candidate`. In a transfer the
source is the reference. A rule applies in both directions. `rules_file` reads rules from TOML.
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
    "IgnoreRule",
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
"""Labels of the side whose axes a permutation lists: the other side's tensor has its axes in that order."""


@dataclass(frozen=True)
class Sides:
    """The labels by which rules may name the two models."""

    target: tuple[str, ...]
    source: tuple[str, ...]


def side_of(names: Mapping[str, T], labels: Sequence[str]) -> T | None:
    """Return the entry of a rule for one side; None if the rule concerns other sides."""
    return next((names[label] for label in labels if label in names), None)


def _compose(first: Sequence[int], then: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that applies both in turn; an empty one is the identity."""
    return tuple(first[axis] for axis in then) if first and then else tuple(first or then)


@dataclass(frozen=True)
class ModuleRule:
    """Modules of the two sides that correspond."""

    names: Mapping[str, str]
    regex: str = ""
    """The side whose name is a regular expression; the other's is its replacement. Empty if both are patterns."""
    where: str = ""


@dataclass(frozen=True)
class TensorRule:
    """A parameter or buffer and its layout; one tensor of a side may be several of the other."""

    names: Mapping[str, tuple[str, ...]]
    permute: tuple[int, ...] = ()
    axis: int = 0
    bessel: bool = False
    """The first side divides by n - 1, the other by n: the values differ by design."""
    where: str = ""


@dataclass(frozen=True)
class ValueRule:
    """An input or output: 'KIND PATH' within a class rule, 'MODULE KIND PATH' elsewhere."""

    names: Mapping[str, str]
    permute: tuple[int, ...] = ()
    where: str = ""


def permute_to(rule: TensorRule | ValueRule, target: Sequence[str]) -> tuple[int, ...]:
    """Return the permutation that brings the source tensor's axes into the target's order."""
    first = any(label in FIRST for label in target if label in rule.names)
    return inverse(rule.permute) if first else rule.permute


@dataclass(frozen=True)
class IgnoreRule:
    """A module or tensor of one side that has no counterpart by design."""

    side: str
    pattern: str
    why: str
    where: str = ""


@dataclass(frozen=True)
class ClassRule:
    """Equivalent classes, and the names of their tensors. `*` is any class that has those tensors."""

    names: Mapping[str, tuple[str, ...]]
    tensors: tuple[TensorRule, ...] = ()
    values: tuple[ValueRule, ...] = ()
    ignores: tuple[IgnoreRule, ...] = ()
    whole: bool = False
    """Whether modules below such a module may differ."""
    like: str = ""
    """The class of which these are variants: they compute the same with another layout of their tensors."""
    where: str = ""

    def permute_of(self, labels: Sequence[str], tensor: str) -> tuple[int, ...]:
        """Return the rule's permutation for a tensor by its name on one side."""
        return next((t.permute for t in self.tensors if side_of(t.names, labels) == (tensor,)), ())

    def names_class(self, labels: Sequence[str], classes: Sequence[str]) -> bool:
        """Whether the rule lists one of these classes for a side; a lone `*` lists none."""
        words = [word for word in side_of(self.names, labels) or () if word != "*"]
        return any(matches(word, cls) for cls in classes for word in words)


@dataclass(frozen=True)
class Rules:
    """A table of rules. Earlier rules win."""

    modules: tuple[ModuleRule, ...] = ()
    classes: tuple[ClassRule, ...] = ()
    tensors: tuple[TensorRule, ...] = ()
    values: tuple[ValueRule, ...] = ()
    ignores: tuple[IgnoreRule, ...] = ()
    structure: bool = True
    """Whether modules that neither name nor rule matches may be matched by structure."""
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
        """Return one name for a class and its counterparts: BatchNorm2d and BatchNorm2D, ModuleList and LayerList."""
        key = (labels[0], classes)
        if key not in self._canon:
            rule = next((rule for rule in self.classes if rule.names_class(labels, classes)), None)
            word = classes[-1] if rule is None else rule.like or next(iter(rule.names.values()))[0]
            self._canon[key] = word.lower()
        return self._canon[key]

    def to_first(self, labels: Sequence[str], classes: Sequence[str], tensor: str) -> tuple[int, ...]:
        """Return the permutation from a class's tensor to the layout of the first side's usual class.

        The result is empty if the layouts agree, or if no rule knows the class.
        """
        rule = next((rule for rule in self.classes if rule.names_class(labels, classes)), None)
        if rule is None:
            return ()
        if rule.like:
            usual = next((each for each in self.classes if each.names_class(FIRST, (rule.like,))), None)
            own, others = rule.permute_of(labels, tensor), () if usual is None else usual.permute_of(FIRST, tensor)
            if labels[0] in FIRST:  # into the other side's layout, and from there into the usual one
                return _compose(own, inverse(others))
        return inverse(rule.permute_of(labels, tensor)) if labels[0] not in FIRST else ()

    def outputs_axis(self, labels: Sequence[str], classes: Sequence[str]) -> int | None:
        """Return the axis of a Linear's weight along which its outputs lie; None if the class is not a known Linear."""
        if self.canonical(labels, tuple(classes)) != "linear":
            return None
        axes = self.to_first(labels, classes, "weight")
        return axes[0] if axes else 0

    def opaque(self, labels: Sequence[str], classes: Sequence[str]) -> bool:
        """Whether modules below this class may differ."""
        return any(rule.whole for rule in self.classes if rule.names_class(labels, classes))

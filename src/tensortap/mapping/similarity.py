"""Scores the similarity of two subtrees of modules by their classes and the shapes of their tensors, in any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from math import prod

from tensortap.mapping.class_rules import find_triples
from tensortap.mapping.outline import ModelOutline
from tensortap.mapping.rules import SIDES, Rules

__all__ = ["SubtreeSignatures", "SubtreeSimilarity"]

_ROLES = SIDES[1]

Item = tuple[str, tuple[tuple[int, ...], ...]]
"""A module of a subtree: its canonical class, and the shapes of its own parameters."""
Signature = tuple[Item, ...]


class SubtreeSignatures:
    """The subtrees of one outline, each described in a form that both sides share."""

    def __init__(self, outline: ModelOutline, rules: Rules, labels: Sequence[str]) -> None:
        self.outline = outline
        self._rules = rules
        self._labels = labels
        self._one_framework = labels[0] in _ROLES
        self._found: dict[str, Signature] = {}

    def canonical_class(self, name: str) -> str:
        return self._rules.canonical(self._labels, self.outline.modules[name].classes)

    def has_rule(self, name: str) -> bool:
        """Whether a rule names a module's class."""
        classes = self.outline.modules[name].classes
        return any(rule.names_class(self._labels, classes) for rule in self._rules.classes)

    def signature(self, name: str) -> Signature:
        """Return the modules of a subtree that compute something, in order.

        Containers do not appear. If any module has parameters, modules without parameters do not appear either: an
        activation may be a function on one side and a module on the other.
        """
        if name not in self._found:
            children = self.outline.children(name)
            opaque = self._rules.opaque(self._labels, self.outline.modules[name].classes)
            if opaque or not children:
                shapes = ((self.elements(name),),) if opaque else self.own_shapes(name)
                found: Signature = ((self.canonical_class(name), shapes),)
            else:
                own = (("", self.own_shapes(name)),) if self.own_shapes(name) else ()
                below = own + self._below(name, children)
                found = tuple(item for item in below if item[1]) or below
            self._found[name] = found
        return self._found[name]

    def _below(self, name: str, children: Sequence[str]) -> Signature:
        """Return the items of all children; query, key and value appear as one Linear."""
        skip = len(name) + 1 if name else 0
        found = [(child[skip:], self.signature(child)) for child in children]
        for triple in find_triples([child for child, _ in found]):
            three = [items for child, items in found if child in triple]
            alike = len(set(three)) == 1 and len(three[0]) == 1 and three[0][0][0] == "linear"
            if alike:
                packed = tuple((3 * shape[0], *shape[1:]) for shape in three[0][0][1])
                found = [(child, (("linear", packed),) if child == triple[0] else items) for child, items in found]
                found = [(child, items) for child, items in found if child not in triple[1:]]
                break
        return tuple(item for _, items in found for item in items)

    def single_chain(self, name: str) -> list[str]:
        """Return a module and, outermost first, the modules below it that are the only child of their parent."""
        found = [name]
        while len(below := self.outline.children(found[-1])) == 1:
            found.append(below[0])
        return found

    def size(self, name: str) -> int:
        """Return the number of items below a container; 0 for a leaf."""
        return len(self.signature(name)) if self.outline.children(name) else 0

    def elements(self, name: str) -> int:
        """Return the number of elements in the parameters of a subtree."""
        own = self.outline.modules[name].tensors.values()
        here = sum(prod(tensor.shape) for tensor in own if tensor.kind == "param" and not tensor.tied)
        return here + sum(self.elements(child) for child in self.outline.children(name))

    def own_shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a module's own parameters, sorted, in one layout for both sides.

        If no rule knows the class's layout, the sizes of each shape are sorted, too.
        """
        module = self.outline.modules[name]
        rule = next((rule for rule in self._rules.classes if rule.names_class(self._labels, module.classes)), None)
        found = []
        for own, tensor in module.tensors.items():
            if tensor.kind != "param" or prod(tensor.shape) < 2:
                continue
            shape = tensor.shape
            axes = self._rules.to_first(self._labels, module.classes, own)
            shape = tuple(shape[axis] for axis in axes) if len(axes) == len(shape) else shape
            sizes = [size for size in shape if size != 1]
            found.append(tuple(sizes if rule is not None or self._one_framework else sorted(sizes)))
        return tuple(sorted(found))


class SubtreeSimilarity:
    """Compares subtrees of two outlines, and caches the scores."""

    def __init__(self, target: SubtreeSignatures, source: SubtreeSignatures) -> None:
        self._target, self._source = target, source
        self._scores: dict[tuple[Signature, Signature], float] = {}

    def same(self, target: str, source: str) -> bool:
        """Whether two subtrees agree in everything but names. A container is not the module that it holds."""
        if self._target.signature(target) != self._source.signature(source):
            return False
        depths = bool(self._target.outline.children(target)), bool(self._source.outline.children(source))
        return depths[0] == depths[1] or self._same_class(target, source)

    def may_be_same(self, target: str, source: str) -> bool:
        """Whether nothing contradicts that two modules do the same.

        Both are leaves or neither is, and their classes agree or are unknown to the rules.
        """
        depths = bool(self._target.outline.children(target)), bool(self._source.outline.children(source))
        known = self._target.has_rule(target), self._source.has_rule(source)
        return depths[0] == depths[1] and (not all(known) or self._same_class(target, source))

    def _same_class(self, target: str, source: str) -> bool:
        return self._target.canonical_class(target) == self._source.canonical_class(source)

    def _leaf_against_container(self, target: str, source: str) -> bool:
        """Whether one is a leaf with parameters and the other a container."""
        leaves = [not tree.outline.children(n) for tree, n in ((self._target, target), (self._source, source))]
        leaf = self._target.signature(target) if leaves[0] else self._source.signature(source)
        return leaves[0] != leaves[1] and bool(leaf[0][1])

    def signatures(self, side: int, names: Sequence[str]) -> set[Signature]:
        """Return the signatures of modules of a side (0 target, 1 source)."""
        tree = (self._target, self._source)[side]
        return {tree.signature(name) for name in names}

    def score(self, target: str, source: str) -> float:
        """Return a similarity from 0, nothing in common, to 1."""
        left, right = self._target.signature(target), self._source.signature(source)
        if len(left) != len(right) and self._leaf_against_container(target, source):
            return 0.0
        if (left, right) not in self._scores:
            single = len(left) == len(right) == 1
            self._scores[left, right] = _score_items(left[0], right[0]) if single else _score_sequences(left, right)
        found = self._scores[left, right]
        elements = self._target.elements(target)
        same_size = len(left) + len(right) > 2 and elements > 0 and elements == self._source.elements(source)
        return max(found, 0.6) if same_size else found


def _score_sequences(left: Signature, right: Signature) -> float:
    return SequenceMatcher(None, left, right, autojunk=False).ratio()


def _score_items(left: Item, right: Item) -> float:
    (target_class, target_shapes), (source_class, source_shapes) = left, right
    if target_class == source_class:
        if target_shapes == source_shapes:
            return 1.0
        if not target_shapes or not source_shapes:  # perhaps not recorded
            return 0.8
        common = (Counter(target_shapes) & Counter(source_shapes)).total()
        return 0.4 + 0.5 * common / max(len(target_shapes), len(source_shapes))
    if target_shapes != source_shapes:
        return 0.0
    return 0.6 if target_shapes else 0.2

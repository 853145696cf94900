"""How alike two modules look from outside: classes, shapes of tensors up to their layout, and what hangs below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from math import prod

from tensortap.mapping.outline import Outline
from tensortap.mapping.packing import triples
from tensortap.mapping.rules import SIDES, Rules

__all__ = ["Likeness", "Look"]

_ROLES = SIDES[1]
Item = tuple[str, tuple[tuple[int, ...], ...]]


class Look:
    """One outline as the other one may look: each subtree as a row of the modules in it that do something."""

    def __init__(self, outline: Outline, rules: Rules, labels: Sequence[str]) -> None:
        self.outline = outline
        self._rules = rules
        self._labels = labels
        self._one_language = labels[0] in _ROLES
        self._items: dict[str, tuple[Item, ...]] = {}

    def canonical(self, name: str) -> str:
        return self._rules.canonical(self._labels, self.outline.modules[name].classes)

    def known(self, name: str) -> bool:
        """Whether a rule names a module's class."""
        classes = self.outline.modules[name].classes
        return any(rule.names_class(self._labels, classes) for rule in self._rules.classes)

    def items(self, name: str) -> tuple[Item, ...]:
        """What a subtree is made of, in order. Modules that only hold others do not show, and beside parameters those
        do not that have none: an activation may be a function on one side and a module on the other."""
        if name not in self._items:
            children = self.outline.children(name)
            opaque = self._rules.opaque(self._labels, self.outline.modules[name].classes)
            if opaque or not children:
                shapes = ((self.elements(name),),) if opaque else self._shapes(name)
                found: tuple[Item, ...] = ((self.canonical(name), shapes),)
            else:
                own = (("", self._shapes(name)),) if self._shapes(name) else ()
                below = own + self._below(name, children)
                found = tuple(item for item in below if item[1]) or below
            self._items[name] = found
        return self._items[name]

    def _below(self, name: str, children: Sequence[str]) -> tuple[Item, ...]:
        """What children are made of. A query, a key and a value show as the one Linear that the other side may have."""
        skip = len(name) + 1 if name else 0
        found = [(child[skip:], self.items(child)) for child in children]
        for triple in triples([child for child, _ in found]):
            three = [items for child, items in found if child in triple]
            alike = len(set(three)) == 1 and len(three[0]) == 1 and three[0][0][0] == "linear"
            if alike:
                packed = tuple((3 * shape[0], *shape[1:]) for shape in three[0][0][1])
                found = [(child, (("linear", packed),) if child == triple[0] else items) for child, items in found]
                found = [(child, items) for child, items in found if child not in triple[1:]]
                break
        return tuple(item for _, items in found for item in items)

    def own(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The shapes of a module's own parameters, in one layout for both sides."""
        return self._shapes(name)

    def single(self, name: str) -> list[str]:
        """A module, and what it holds alone, from outside in."""
        found = [name]
        while len(below := self.outline.children(found[-1])) == 1:
            found.append(below[0])
        return found

    def size(self, name: str) -> int:
        """How much hangs below a module."""
        return len(self.items(name)) if self.outline.children(name) else 0

    def elements(self, name: str) -> int:
        """How many numbers the parameters of a subtree have."""
        own = self.outline.modules[name].tensors.values()
        here = sum(prod(tensor.shape) for tensor in own if tensor.kind == "param" and not tensor.tied)
        return here + sum(self.elements(child) for child in self.outline.children(name))

    def _shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The shapes of a module's own parameters, whatever their names; in one layout for both sides, if that is known
        of the class, else without any."""
        module = self.outline.modules[name]
        rule = next((rule for rule in self._rules.classes if rule.names_class(self._labels, module.classes)), None)
        found = []
        for own, tensor in module.tensors.items():
            if tensor.kind != "param" or prod(tensor.shape) < 2:
                continue
            shape = tensor.shape
            turn = self._rules.to_first(self._labels, module.classes, own)
            shape = tuple(shape[axis] for axis in turn) if len(turn) == len(shape) else shape
            sizes = [size for size in shape if size != 1]
            found.append(tuple(sizes if rule is not None or self._one_language else sorted(sizes)))
        return tuple(sorted(found))


class Likeness:
    """Compares subtrees of two outlines; the answers are kept."""

    def __init__(self, made: Look, given: Look) -> None:
        self._made, self._given = made, given
        self._known: dict[tuple[tuple[Item, ...], tuple[Item, ...]], float] = {}

    def same(self, made: str, given: str) -> bool:
        """Whether two subtrees look the same in everything but names. What holds a module is not that module."""
        if self._made.items(made) != self._given.items(given):
            return False
        depths = bool(self._made.outline.children(made)), bool(self._given.outline.children(given))
        return depths[0] == depths[1] or self._made.canonical(made) == self._given.canonical(given)

    def may_be_same(self, made: str, given: str) -> bool:
        """Whether nothing speaks against it that two modules do the same: both are leaves, or neither, and their
        classes are the same, or unknown to the rules."""
        depths = bool(self._made.outline.children(made)), bool(self._given.outline.children(given))
        known = self._made.known(made), self._given.known(given)
        return depths[0] == depths[1] and (not all(known) or self._made.canonical(made) == self._given.canonical(given))

    def _holds_others(self, made: str, given: str) -> bool:
        """Whether one is a module by itself, with parameters, and the other holds several."""
        leaves = [not look.outline.children(n) for look, n in ((self._made, made), (self._given, given))]
        alone = self._made.items(made) if leaves[0] else self._given.items(given)
        return leaves[0] != leaves[1] and bool(alone[0][1])

    def looks(self, side: int, names: Sequence[str]) -> set[tuple[Item, ...]]:
        """What modules of a side (0 made, 1 given) look like."""
        look = (self._made, self._given)[side]
        return {look.items(name) for name in names}

    def degree(self, made: str, given: str) -> float:
        """From 0, nothing in common, to 1."""
        left, right = self._made.items(made), self._given.items(given)
        if len(left) != len(right) and self._holds_others(made, given):
            return 0.0
        if (left, right) not in self._known:
            self._known[left, right] = (
                _of_two(left[0], right[0]) if len(left) == len(right) == 1 else _of_rows(left, right)
            )
        found = self._known[left, right]
        elements = self._made.elements(made)
        same_size = len(left) + len(right) > 2 and elements > 0 and elements == self._given.elements(given)
        return max(found, 0.6) if same_size else found


def _of_rows(left: Sequence[Item], right: Sequence[Item]) -> float:
    return SequenceMatcher(None, left, right, autojunk=False).ratio()


def _of_two(left: Item, right: Item) -> float:
    (our_class, our_shapes), (their_class, their_shapes) = left, right
    if our_class == their_class:
        if our_shapes == their_shapes:
            return 1.0
        if not our_shapes or not their_shapes:  # perhaps not recorded
            return 0.8
        common = (Counter(our_shapes) & Counter(their_shapes)).total()
        return 0.4 + 0.5 * common / max(len(our_shapes), len(their_shapes))
    if our_shapes != their_shapes:
        return 0.0
    return 0.6 if our_shapes else 0.2

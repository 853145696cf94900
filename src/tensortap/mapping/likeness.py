"""How alike two modules look from outside: classes, shapes of tensors up to their layout, and what hangs below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from math import prod

from tensortap.mapping.layouts import inverse
from tensortap.mapping.outline import Outline
from tensortap.mapping.rules import FIRST, SIDES, Rules, side_of

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
                below = own + tuple(item for child in children for item in self.items(child))
                found = tuple(item for item in below if item[1]) or below
            self._items[name] = found
        return self._items[name]

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
            if rule is not None and self._labels[0] not in FIRST:
                turns = (t.permute for t in rule.tensors if side_of(t.names, self._labels) == (own,))
                permute = next((turn for turn in turns if len(turn) == len(shape)), ())
                shape = tuple(shape[axis] for axis in inverse(permute)) if permute else shape
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

    def looks(self, side: int, names: Sequence[str]) -> set[tuple[Item, ...]]:
        """What modules of a side (0 made, 1 given) look like."""
        look = (self._made, self._given)[side]
        return {look.items(name) for name in names}

    def degree(self, made: str, given: str) -> float:
        """From 0, nothing in common, to 1."""
        left, right = self._made.items(made), self._given.items(given)
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

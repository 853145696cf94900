"""Which parameter or buffer of one side is which of the other, and how it has to be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tensortap.mapping.layouts import Reading, Shape, same_elements
from tensortap.mapping.outline import Outline, Own, full_name
from tensortap.mapping.patterns import matches, translator
from tensortap.mapping.places import Places
from tensortap.mapping.rules import TensorRule, permute_to, side_of

__all__ = ["Tensors"]


@dataclass
class Tensors:
    """Readings of the made side's tensors, by full name, and what could not be placed."""

    places: Places
    readings: dict[str, Reading] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    bessel: set[str] = field(default_factory=set)
    """Tensors of the made side that differ from the other side's by design, as n - 1 from n."""
    ignored: tuple[dict[str, str], dict[str, str]] = field(default_factory=lambda: ({}, {}))
    """Per side: full name → why it has no counterpart."""
    refused: tuple[dict[str, str], dict[str, str]] = field(default_factory=lambda: ({}, {}))
    """Per side: full name → why its counterpart does not fit."""
    unused: list[TensorRule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._taken: set[str] = set()
        self._ignore()
        for rule in self.places.rules.tensors:
            if not self._by_rule(rule):
                self.unused.append(rule)
        for made in self.places.of_made:
            self._by_class(made)
        for made, given in self.places.of_made.items():
            self._by_name(made, given)
            self._by_shape(made, given)
        if self.places.rules.structure:
            self._only_ones()
        names = (full_name(name, own) for name, module in self.places.made.modules.items() for own in module.tensors)
        self.readings = {name: self.readings[name] for name in names if name in self.readings}

    # --- what is left ----------------------------------------------------------------------------------------------
    def left(self, side: int) -> Iterator[tuple[str, str]]:
        """(full name, why) of every tensor of a side that has no counterpart; tied ones count by their first name."""
        outline = (self.places.made, self.places.given)[side]
        placed = (self.places.of_made, self.places.of_given)[side]
        done = (self.readings.keys(), self._taken)[side]
        for module in outline.modules.values():
            for own, tensor in module.tensors.items():
                name = full_name(module.name, own)
                if name in done or name in self.ignored[side] or (tensor.tied and tensor.tied in done):
                    continue
                other = placed.get(module.name)
                nobody = "its module has no counterpart" if other is None else f"{other or '(root)'} has no such tensor"
                yield name, self.refused[side].get(name, nobody)

    def shared(self, side: int, ties: Mapping[str, str]) -> set[str]:
        """Tensors of a side whose counterparts other ones are tied to."""
        firsts = set(ties.values())
        if side == 0:
            return {name for name, reading in self.readings.items() if reading.parts[0] in firsts}
        return {reading.parts[0] for name, reading in self.readings.items() if name in firsts}

    # --- one rule after the other ----------------------------------------------------------------------------------
    def _ignore(self) -> None:
        sides = self.places.sides
        outlines = ((self.places.made, sides.made), (self.places.given, sides.given))
        for side, (outline, labels) in enumerate(outlines):
            for name, module in outline.modules.items():
                rules = [rule for rule in self.places.rules.ignores if rule.side in labels]
                for rule in rules:
                    if matches(rule.pattern, name):
                        self.ignored[side].update((full_name(name, own), rule.why) for own in module.tensors)
                for own in module.tensors:
                    for rule in rules:
                        if matches(rule.pattern, full_name(name, own)):
                            self.ignored[side].setdefault(full_name(name, own), rule.why)
        for made, given in self.places.of_made.items():
            if (rule_of_class := self.places.class_rule(made)) is None:
                continue
            for rule in rule_of_class.ignores:
                side = 0 if rule.side in sides.made else 1
                outline, name = ((self.places.made, made), (self.places.given, given))[side]
                for own in outline.modules[name].tensors:
                    if matches(rule.pattern, own):
                        self.ignored[side].setdefault(full_name(name, own), rule.why)

    def _by_rule(self, rule: TensorRule) -> bool:
        ours, theirs = self._names(rule)
        if not ours or not theirs:
            return True  # it is about other sides
        one, outline = (ours[0], self.places.made) if len(ours) == 1 else (theirs[0], self.places.given)
        others = theirs if len(ours) == 1 else ours
        used = False
        for module in outline.modules.values():
            for own in module.tensors:
                name = full_name(module.name, own)
                found = [translator(one, other)(name) for other in others]
                if found and None not in found:
                    names = ([name], [str(n) for n in found])
                    used |= self._take(rule, *(names if len(ours) == 1 else names[::-1]), "rule")
        return used

    def _by_class(self, made: str) -> None:
        given, rule = self.places.of_made[made], self.places.class_rule(made)
        for tensor in rule.tensors if rule is not None else ():
            ours, theirs = self._names(tensor)
            names = [full_name(made, name) for name in ours], [full_name(given, name) for name in theirs]
            self._take(tensor, *names, "rule")

    def _names(self, rule: TensorRule) -> tuple[Sequence[str], Sequence[str]]:
        sides = self.places.sides
        return side_of(rule.names, sides.made) or (), side_of(rule.names, sides.given) or ()

    def _take(self, rule: TensorRule, ours: Sequence[str], theirs: Sequence[str], how: str) -> bool:
        """Readings of all tensors that a rule names, if they are all there and not taken."""
        known = [self._own(self.places.made, ours), self._own(self.places.given, theirs)]
        if None in known[0] or None in known[1] or any(n in self.readings for n in ours) or self._taken & set(theirs):
            return False
        our_shapes = [shape for shape in known[0] if shape is not None]
        their_shapes = [shape for shape in known[1] if shape is not None]
        permute = permute_to(rule, self.places.sides.made)
        found, at = {}, 0
        for name, shape in zip(ours, our_shapes, strict=True):
            reading = Reading(tuple(theirs), permute, rule.axis)
            if len(ours) > 1:
                back = permute.index(rule.axis) if permute else rule.axis
                size = shape[back] if back < len(shape) else 0
                reading = Reading(tuple(theirs), permute, rule.axis, (at, at + size))
                at += size
            fitting = self._fitted(reading, shape, their_shapes)
            if fitting is None:
                self._refuse(ours, theirs, our_shapes, their_shapes)
                return False
            found[name] = fitting
        self.readings |= found
        self.how |= dict.fromkeys(found, how)
        self._taken |= set(theirs)
        if rule.bessel:
            self.bessel |= set(ours)
        return True

    def _by_name(self, made: str, given: str) -> None:
        for own in self.places.made.modules[made].tensors:
            self._pair(full_name(made, own), full_name(given, own), "same name")

    def _by_shape(self, made: str, given: str) -> None:
        """What is left of both, in its order, if shapes and numbers agree. Tied tensors come with their first names."""
        ours = [n for n in self.places.made.modules[made].tensors if self._open(0, full_name(made, n))]
        theirs = [n for n in self.places.given.modules[given].tensors if self._open(1, full_name(given, n))]
        if len(ours) == len(theirs):
            for one, other in zip(ours, theirs, strict=True):
                self._pair(full_name(made, one), full_name(given, other), "order")

    def _only_ones(self) -> None:
        """Tensors that are left below modules that belong together, where either side has but one of a shape there."""
        left = [
            [
                (module.name, own, tensor)
                for module in outline.modules.values()
                for own, tensor in module.tensors.items()
                if tensor.shape and not tensor.tied and self._open(side, full_name(module.name, own))
            ]
            for side, outline in enumerate((self.places.made, self.places.given))
        ]

        def fits(ours: tuple[str, str, Own], theirs: tuple[str, str, Own]) -> bool:
            same = ours[2].shape == theirs[2].shape and ours[2].kind == theirs[2].kind
            return same and self.places.related(ours[0], theirs[0])

        for ours in left[0]:
            found = [theirs for theirs in left[1] if fits(ours, theirs)]
            if len(found) == 1 and sum(fits(other, found[0]) for other in left[0]) == 1:
                self._pair(full_name(*ours[:2]), full_name(*found[0][:2]), "shape")

    def _free(self, side: int, name: str) -> bool:
        taken = self.readings.keys() if side == 0 else self._taken
        return name not in taken and name not in self.ignored[side] and name not in self.refused[side]

    def _open(self, side: int, name: str) -> bool:
        """Whether a tensor has no counterpart yet, under any of its names."""
        outline, done = (self.places.made, self.readings.keys()) if side == 0 else (self.places.given, self._taken)
        return self._free(side, name) and outline.tensor(name).tied not in done

    def _pair(self, ours: str, theirs: str, how: str) -> None:
        known = self._own(self.places.made, [ours])[0], self._own(self.places.given, [theirs])[0]
        if None in known or not self._free(0, ours) or not self._free(1, theirs):
            return
        our_shape, their_shape = known
        assert our_shape is not None and their_shape is not None
        plain = self._fitted(Reading((theirs,)), our_shape, [their_shape])
        if plain is None and len(our_shape) == 2:
            plain = self._fitted(Reading((theirs,), (1, 0)), our_shape, [their_shape])
            how = "shape"
        if plain is None:
            self._refuse([ours], [theirs], [our_shape], [their_shape])
            return
        self.readings[ours], self.how[ours] = plain, how
        self._taken.add(theirs)

    def _fitted(self, reading: Reading, shape: Shape, given: Sequence[Shape]) -> Reading | None:
        """The reading, if it gives that shape; the plain one if that does, as in a class of one's own."""
        whole = Reading(reading.parts)
        for each in (reading, whole) if len(given) == 1 and reading.cut is None else (reading,):
            found = each.result(given)
            if found is not None and (found == shape or same_elements(found, shape)):
                return Reading(each.parts, each.permute, each.axis, each.cut, shape)
        return None

    def _refuse(
        self, ours: Sequence[str], theirs: Sequence[str], made: Sequence[Shape], given: Sequence[Shape]
    ) -> None:
        for side, (names, shapes, others, other_shapes) in enumerate(
            ((ours, made, theirs, given), (theirs, given, ours, made))
        ):
            against = ", ".join(f"{_sizes(s)} of {n}" for n, s in zip(others, other_shapes, strict=True))
            for name, shape in zip(names, shapes, strict=True):
                self.refused[side].setdefault(name, f"its shape {_sizes(shape)} does not fit {against}")

    @staticmethod
    def _own(outline: Outline, names: Sequence[str]) -> list[Shape | None]:
        return [None if outline.find(name) is None else outline.tensor(name).shape for name in names]


def _sizes(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "scalar"

"""Which module of one tree is which of the other: by rule, by name, and by the structure of the trees.

Goes from the root down. Below two modules that belong together, children of the same name and look are taken first,
then those of the same look in their order, then those of the same name. What is left of containers is opened and tried
once more a level deeper, so that `layer1.0` finds `stages.0.blocks.0`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tensortap.mapping.likeness import Likeness, Look
from tensortap.mapping.outline import Outline, full_name
from tensortap.mapping.packing import Packing
from tensortap.mapping.patterns import translator
from tensortap.mapping.rules import ClassRule, ModuleRule, Rules, Sides, side_of

__all__ = ["Places", "class_rule"]

Fits = Callable[[str, str], bool]
_NAME = 1e-3  # decides between pairs that are worth the same


class _Open(NamedTuple):
    """What is not placed yet, of two places that belong together."""

    made: list[str]
    given: list[str]


class Places:
    """Pairs of modules of two outlines, and how each was found."""

    def __init__(
        self,
        made: Outline,
        given: Outline,
        rules: Rules,
        sides: Sides,
        rename: Callable[[str], str] | None = None,
        known: Mapping[str, str] | None = None,
    ) -> None:
        """`known` are modules of the given side that values have shown to be modules of the made one."""
        self.made, self.given = made, given
        self.rules, self.sides = rules, sides
        self.of_made: dict[str, str] = {}
        self.of_given: dict[str, str] = {}
        self.how: dict[str, str] = {}
        """By the name on the side that is made."""
        self.alike: dict[str, list[str]] = {}
        """Modules that were placed by their look and order, with all that look the same; both sides have as many."""
        self.unused: list[ModuleRule] = []
        self._looks = Look(made, rules, sides.made), Look(given, rules, sides.given)
        self._likeness = Likeness(*self._looks)
        self._waiting: list[str] = []
        self.packing = Packing(made, given, rules, sides)
        self._parted: set[str] = set()
        self._packed: tuple[set[str], set[str]] = (set(), set())
        self._class_rules: dict[tuple[str, str], ClassRule | None] = {}
        for name, other in (known or {}).items():
            self._place(other, name, "values")
        if rename is not None:
            self._by_rename(rename)
        for rule in rules.modules:
            self._by_rule(rule)
        self._place("", "", "root")
        self._descend()
        if rules.structure:
            self._only_ones()
            self._part_containers()
        self._containers()
        for name in made.modules:
            if name in given.modules and name not in self._parted:
                self._place(name, name, "same name")
        self.of_made = {name: self.of_made[name] for name in made.modules if name in self.of_made}

    def class_rule(self, made: str) -> ClassRule | None:
        """The rule for the classes of a pair."""
        pair = (made, self.of_made[made])
        if pair not in self._class_rules:
            self._class_rules[pair] = class_rule(self, *pair)
        return self._class_rules[pair]

    def packed(self, made: str) -> tuple[set[str], set[str]]:
        """Modules of either side whose tensors are the other side's own, or are packed otherwise there."""
        rule, around = self.class_rule(made), (made, self.of_made[made])
        found: tuple[set[str], set[str]] = (set(), set())
        for tensor in rule.tensors if rule is not None else ():
            names = [side_of(tensor.names, labels) or () for labels in (self.sides.made, self.sides.given)]
            for side, (own, others) in enumerate((names, names[::-1])):
                if len(own) != len(others) or not any("." in name for name in others):
                    found[side].update(full_name(around[side], n.rpartition(".")[0]) for n in own if "." in n)
        return found

    # --- what is said ----------------------------------------------------------------------------------------------
    def _by_rename(self, rename: Callable[[str], str]) -> None:
        for name in self.given.modules:
            other = rename(name)
            if other != name and other in self.made.modules:
                self._place(other, name, "rename")

    def _by_rule(self, rule: ModuleRule) -> None:
        ours, theirs = side_of(rule.names, self.sides.made), side_of(rule.names, self.sides.given)
        if ours is None or theirs is None:
            return
        before = len(self.of_made)
        if rule.regex and rule.regex in self.sides.made:
            translate = translator(ours, theirs, regex=True)
            for name in self.made.modules:
                self._place(name, translate(name), "rule")
        else:
            translate = translator(theirs, ours, regex=bool(rule.regex))
            for name in self.given.modules:
                self._place(translate(name), name, "rule")
        if len(self.of_made) == before:
            self.unused.append(rule)

    def _place(self, made: str | None, given: str | None, how: str) -> bool:
        if made not in self.made.modules or given not in self.given.modules:
            return False
        if made in self.of_made or given in self.of_given:
            return False
        if how == "structure":
            made, given = self._at_one_depth(made, given)
        self.of_made[made], self.of_given[given], self.how[made] = given, made, how
        self._waiting.append(made)
        return True

    # --- what is found ---------------------------------------------------------------------------------------------
    def _descend(self) -> None:
        while self._waiting:
            self._below(self._waiting.pop(0))

    def related(self, made: str, given: str) -> bool:
        """Whether two modules are, or are below, modules that belong together, and nothing placed lies in between."""
        ours = [name for name in (made, *self.made.above(made), "") if name in self.of_made]
        theirs = [self.of_given[name] for name in (given, *self.given.above(given), "") if name in self.of_given]
        return ours[0] in theirs or theirs[0] in ours

    def _only_ones(self) -> None:
        """Modules with parameters that are left, where either side has but one with tensors of these shapes. So a
        downsampling that is a list of its own finds the one that each stage holds."""
        left = [
            [name for name in outline.modules if name not in placed and name not in packed and look.own(name)]
            for outline, placed, packed, look in zip(
                (self.made, self.given), (self.of_made, self.of_given), self._packed, self._looks, strict=True
            )
        ]
        alike = [Counter(look.own(name) for name in names) for look, names in zip(self._looks, left, strict=True)]
        for ours in left[0]:
            shapes = self._looks[0].own(ours)
            if alike[0][shapes] == alike[1][shapes] == 1:
                theirs = next(name for name in left[1] if self._looks[1].own(name) == shapes)
                if self._likeness.may_be_same(ours, theirs) and self.related(ours, theirs):
                    self._place(ours, theirs, "structure")
        self._descend()

    def _below(self, made: str) -> None:
        if not self.rules.structure:
            return
        given = self.of_made[made]
        for known, found in zip(self._packed, self.packed(made), strict=True):
            known |= found
        self._level(self.made.children(made), self.given.children(given))

    def _level(self, ours: Sequence[str], theirs: Sequence[str]) -> None:
        likeness = self._likeness
        left = self._by_name(self._open(ours, theirs), lambda m, g: _says(m) and likeness.same(m, g))
        left = self._by_name(left, lambda m, g: _says(m) and likeness.degree(m, g) >= 0.5)
        left = self._same_in_order(left)
        left = self._by_name(left, lambda m, g: likeness.degree(m, g) >= 0.2)
        if not left.made or not left.given:
            return
        if (wider := self._opened(left)) is not None:
            self._level(wider.made, wider.given)
            return
        left = self._in_order(left, lambda m, g: degree if (degree := likeness.degree(m, g)) >= 0.5 else 0.0)
        if len(left.made) == len(left.given) == 1:
            self._place(left.made[0], left.given[0], "elimination")

    def _open(self, ours: Sequence[str], theirs: Sequence[str]) -> _Open:
        return _Open(
            [name for name in ours if name not in self.of_made and name not in self._packed[0]],
            [name for name in theirs if name not in self.of_given and name not in self._packed[1]],
        )

    def _opened(self, left: _Open) -> _Open | None:
        """The largest container's children in its place, so that the sides meet at the same depth; None if all that is
        left has none."""
        sizes = [[look.size(name) for name in names] for look, names in zip(self._looks, left, strict=True)]
        largest = max(size for side in sizes for size in side)
        if not largest:
            return None
        found = [
            [
                child
                for name, size in zip(names, sizes_here, strict=True)
                for child in (look.outline.children(name) if size == largest else [name])
            ]
            for look, names, sizes_here in zip(self._looks, left, sizes, strict=True)
        ]
        return self._open(*found)

    def _by_name(self, left: _Open, fits: Fits) -> _Open:
        by_name: dict[str, list[str]] = {}
        for theirs in left.given:
            by_name.setdefault(_last(theirs), []).append(theirs)
        for ours in left.made:
            same = (n for n in by_name.get(_last(ours), ()) if n not in self.of_given and fits(ours, n))
            if (found := next(same, None)) is not None:
                self._place(ours, found, "same name" if ours == found else "structure")
        return self._open(left.made, left.given)

    def _at_one_depth(self, made: str, given: str) -> tuple[str, str]:
        """Of two modules and what each holds alone, those that own tensors of the same shapes: a list of one block is
        not that block."""
        ours, theirs = self._looks[0].single(made), self._looks[1].single(given)
        wanted = self._looks[0].own(made) or self._looks[1].own(given)
        for one in ours if wanted else ():
            for other in theirs:
                free = one not in self.of_made and other not in self.of_given
                if free and self._looks[0].own(one) == self._looks[1].own(other) == wanted:
                    return one, other
        return made, given

    def _same_in_order(self, left: _Open) -> _Open:
        """Those of the same look in their order; names decide where that leaves a choice. Where both sides have but one
        of a look, it needs no order."""
        looks = self._likeness.looks(0, left.made) & self._likeness.looks(1, left.given)
        self._note_alike(left)
        once = [Counter(look.items(name) for name in names) for look, names in zip(self._looks, left, strict=True)]
        for ours in left.made:
            item = self._looks[0].items(ours)
            if once[0][item] == once[1][item] == 1:
                theirs = next(name for name in left.given if self._looks[1].items(name) == item)
                if self._likeness.same(ours, theirs):
                    self._place(ours, theirs, "same name" if ours == theirs else "structure")
        left = self._open(left.made, left.given)
        alike = [
            [name for name in names if look.items(name) in looks] for look, names in zip(self._looks, left, strict=True)
        ]
        self._in_order(_Open(*alike), lambda m, g: self._likeness.same(m, g) * (1 + _NAME * (_last(m) == _last(g))))
        return self._open(left.made, left.given)

    def _note_alike(self, left: _Open) -> None:
        groups: list[dict[object, list[str]]] = [{}, {}]
        for side, (names, look) in enumerate(zip(left, self._looks, strict=True)):
            for name in names:
                groups[side].setdefault(look.items(name), []).append(name)
        for items, names in groups[0].items():
            if len(names) == len(groups[1].get(items, ())):
                self.alike.update(dict.fromkeys(names, names))

    def look_the_same(self, made: str) -> bool:
        """Whether a module and its counterpart look the same in everything but names."""
        return self._likeness.same(made, self.of_made[made])

    def _in_order(self, left: _Open, worth: Callable[[str, str], float]) -> _Open:
        """The pairs worth most together of which none crosses another."""
        ours, theirs = left.made, left.given
        best = [[0.0] * (len(theirs) + 1) for _ in range(len(ours) + 1)]
        worths = [[worth(m, g) for g in theirs] for m in ours]
        for i in range(len(ours) - 1, -1, -1):
            for j in range(len(theirs) - 1, -1, -1):
                taken = worths[i][j] + best[i + 1][j + 1] if worths[i][j] else 0.0
                best[i][j] = max(best[i + 1][j], best[i][j + 1], taken)
        i = j = 0
        while i < len(ours) and j < len(theirs):
            if worths[i][j] and best[i][j] == worths[i][j] + best[i + 1][j + 1]:
                self._place(ours[i], theirs[j], "same name" if ours[i] == theirs[j] else "structure")
                i, j = i + 1, j + 1
            elif best[i][j] == best[i + 1][j]:
                i += 1
            else:
                j += 1
        return self._open(ours, theirs)

    def _part_containers(self) -> None:
        """Modules that only hold others do not belong together if what one holds was placed outside the other."""
        for made, given in list(self.of_made.items()):
            if self.how[made] not in ("structure", "elimination", "same name") or self.made.modules[made].tensors:
                continue
            for one, other, placed, outlines in (
                (made, given, self.of_made, (self.made, self.given)),
                (given, made, self.of_given, (self.given, self.made)),
            ):
                inside = [placed[leaf] for leaf in outlines[0].leaves(one) if leaf in placed and leaf != one]
                if any(other not in (leaf, *outlines[1].above(leaf)) for leaf in inside if other):
                    del self.of_made[made], self.of_given[given], self.how[made]
                    self._parted.add(made)
                    break

    def _containers(self) -> None:
        """Modules whose parts were all placed in one module of the other side belong together, too."""
        for name in reversed(list(self.made.modules)):
            if name in self.of_made or not self.made.children(name):
                continue
            parts = {self.of_made[leaf] for leaf in self.made.leaves(name) if leaf in self.of_made}
            around = [
                other
                for other in self.given.above(next(iter(parts), ""))
                if other not in self.of_given and parts == {n for n in self.given.leaves(other) if n in self.of_given}
            ]
            if around:
                ran = [other for other in around if self.given.modules[other].called is not None]
                self._place(name, (ran or around)[0], "structure")


def class_rule(places: Places, made: str, given: str) -> ClassRule | None:
    """The first rule for the classes of two modules; one for any class needs the tensors that it names."""
    sides, ours, theirs = places.sides, places.made.modules[made], places.given.modules[given]
    for rule in places.rules.classes:
        listed = rule.names_class(sides.made, ours.classes), rule.names_class(sides.given, theirs.classes)
        if all(listed):
            return rule
        words = side_of(rule.names, sides.made), side_of(rule.names, sides.given)
        either = [found or word == ("*",) for found, word in zip(listed, words, strict=True)]
        if any(listed) and all(either) and _has_tensors(places, rule, made, given):
            return rule
    return places.packing.rule(made, given)


def _has_tensors(places: Places, rule: ClassRule, made: str, given: str) -> bool:
    for outline, name, labels in ((places.made, made, places.sides.made), (places.given, given, places.sides.given)):
        wanted = side_of(rule.tensors[0].names, labels) or ()
        if any(outline.find(full_name(name, tensor)) is None for tensor in wanted):
            return False
    return True


def _says(name: str) -> bool:
    """Whether a name means anything: a number only tells how many came before."""
    return not _last(name).isdecimal()


def _last(name: str) -> str:
    return name.rpartition(".")[2]

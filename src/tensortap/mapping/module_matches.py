"""Matches modules of two models: by rule, by name, and by the structure of the two trees.

The search goes from the root down. Below two matched modules it first takes children of the same name and structure,
then those of the same structure in their order, then those of the same name. It then opens the containers that are left
and tries again one level deeper, so that `layer1.0` finds `stages.0.blocks.0`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tensortap.mapping.class_rules import ClassRules, packed_modules
from tensortap.mapping.outline import ModelOutline
from tensortap.mapping.patterns import translator
from tensortap.mapping.rules import ClassRule, ModuleRule, Rules, Sides, side_of
from tensortap.mapping.similarity import SubtreeSignatures, SubtreeSimilarity

__all__ = ["ModuleMatches"]

_NAME_BONUS = 1e-3
"""Decides between pairs that score the same."""

Fits = Callable[[str, str], bool]


class _Unmatched(NamedTuple):
    """Modules of either side that have no counterpart yet, below two matched modules."""

    target: list[str]
    source: list[str]


class ModuleMatches:
    """Pairs of modules of two outlines, and how each was found."""

    def __init__(
        self,
        target: ModelOutline,
        source: ModelOutline,
        rules: Rules,
        sides: Sides,
        rename: Callable[[str], str] | None = None,
        known: Mapping[str, str] | None = None,
    ) -> None:
        """`known` maps source modules to the target modules that their values have identified."""
        self.target, self.source = target, source
        self.rules, self.sides = rules, sides
        self.source_of: dict[str, str] = {}
        """Target module → source module."""
        self.target_of: dict[str, str] = {}
        """Source module → target module."""
        self.how: dict[str, str] = {}
        """Target module → how the match was found."""
        self.lookalikes: dict[str, list[str]] = {}
        """Target modules matched by structure and order → all siblings of the same structure; equally many per side."""
        self.unused: list[ModuleRule] = []
        self._signatures = (
            SubtreeSignatures(target, rules, sides.target),
            SubtreeSignatures(source, rules, sides.source),
        )
        self._similarity = SubtreeSimilarity(*self._signatures)
        self._queue: list[str] = []
        self._class_rules = ClassRules(target, source, rules, sides)
        self._separated: set[str] = set()
        self._packed: tuple[set[str], set[str]] = (set(), set())
        for name, other in (known or {}).items():
            self._match(other, name, "values")
        if rename is not None:
            self._match_by_rename(rename)
        for rule in rules.modules:
            self._match_by_rule(rule)
        self._match("", "", "root")
        self._descend()
        if rules.structure:
            self._match_unique_shapes()
            self._separate_containers()
        self._match_containers()
        for name in target.modules:
            if name in source.modules and name not in self._separated:
                self._match(name, name, "same name")
        self.source_of = {name: self.source_of[name] for name in target.modules if name in self.source_of}

    def class_rule(self, target: str) -> ClassRule | None:
        """Return the rule for the classes of a matched pair."""
        return self._class_rules.find(target, self.source_of[target])

    def packed(self, target: str) -> tuple[set[str], set[str]]:
        """Return the modules of either side whose tensors the other side owns directly or packs differently."""
        rule, around = self.class_rule(target), (target, self.source_of[target])
        return (set(), set()) if rule is None else packed_modules(rule, around, self.sides)

    def related(self, target: str, source: str) -> bool:
        """Whether two modules are matched or lie below matched modules, with no other match in between."""
        targets = [name for name in (target, *self.target.above(target), "") if name in self.source_of]
        sources = [self.target_of[name] for name in (source, *self.source.above(source), "") if name in self.target_of]
        return targets[0] in sources or sources[0] in targets

    def same_structure(self, target: str) -> bool:
        """Whether a module and its counterpart agree in everything but names."""
        return self._similarity.same(target, self.source_of[target])

    def _match(self, target: str | None, source: str | None, how: str) -> bool:
        if target not in self.target.modules or source not in self.source.modules:
            return False
        if target in self.source_of or source in self.target_of:
            return False
        if how == "structure":
            target, source = self._same_depth(target, source)
        self.source_of[target], self.target_of[source], self.how[target] = source, target, how
        self._queue.append(target)
        return True

    # --- rules -----------------------------------------------------------------------------------------------------
    def _match_by_rename(self, rename: Callable[[str], str]) -> None:
        for name in self.source.modules:
            other = rename(name)
            if other != name and other in self.target.modules:
                self._match(other, name, "rename")

    def _match_by_rule(self, rule: ModuleRule) -> None:
        target_name, source_name = side_of(rule.names, self.sides.target), side_of(rule.names, self.sides.source)
        if target_name is None or source_name is None:
            return
        before = len(self.source_of)
        if rule.regex and rule.regex in self.sides.target:
            translate = translator(target_name, source_name, regex=True)
            for name in self.target.modules:
                self._match(name, translate(name), "rule")
        else:
            translate = translator(source_name, target_name, regex=bool(rule.regex))
            for name in self.source.modules:
                self._match(translate(name), name, "rule")
        if len(self.source_of) == before:
            self.unused.append(rule)

    # --- structure -------------------------------------------------------------------------------------------------
    def _descend(self) -> None:
        while self._queue:
            self._match_below(self._queue.pop(0))

    def _match_below(self, target: str) -> None:
        if not self.rules.structure:
            return
        source = self.source_of[target]
        for known, found in zip(self._packed, self.packed(target), strict=True):
            known |= found
        self._match_level(self.target.children(target), self.source.children(source))

    def _match_level(self, targets: Sequence[str], sources: Sequence[str]) -> None:
        similarity = self._similarity
        left = self._match_by_name(
            self._unmatched(targets, sources), lambda t, s: _is_descriptive(t) and similarity.same(t, s)
        )
        left = self._match_by_name(left, lambda t, s: _is_descriptive(t) and similarity.score(t, s) >= 0.5)
        left = self._match_same_structure(left)
        left = self._match_by_name(left, lambda t, s: similarity.score(t, s) >= 0.2)
        if not left.target or not left.source:
            return
        if (wider := self._open_largest(left)) is not None:
            self._match_level(wider.target, wider.source)
            return
        left = self._match_in_order(left, lambda t, s: score if (score := similarity.score(t, s)) >= 0.5 else 0.0)
        if len(left.target) == len(left.source) == 1:
            self._match(left.target[0], left.source[0], "elimination")

    def _unmatched(self, targets: Sequence[str], sources: Sequence[str]) -> _Unmatched:
        return _Unmatched(
            [name for name in targets if name not in self.source_of and name not in self._packed[0]],
            [name for name in sources if name not in self.target_of and name not in self._packed[1]],
        )

    def _open_largest(self, left: _Unmatched) -> _Unmatched | None:
        """Replace the largest containers by their children, so that both sides reach the same depth.

        Return None if no container is left.
        """
        sizes = [[tree.size(name) for name in names] for tree, names in zip(self._signatures, left, strict=True)]
        largest = max(size for side in sizes for size in side)
        if not largest:
            return None
        found = [
            [
                child
                for name, size in zip(names, sizes_here, strict=True)
                for child in (tree.outline.children(name) if size == largest else [name])
            ]
            for tree, names, sizes_here in zip(self._signatures, left, sizes, strict=True)
        ]
        return self._unmatched(*found)

    def _match_by_name(self, left: _Unmatched, fits: Fits) -> _Unmatched:
        by_name: dict[str, list[str]] = {}
        for source in left.source:
            by_name.setdefault(_last_part(source), []).append(source)
        for target in left.target:
            same = (n for n in by_name.get(_last_part(target), ()) if n not in self.target_of and fits(target, n))
            if (found := next(same, None)) is not None:
                self._match(target, found, "same name" if target == found else "structure")
        return self._unmatched(left.target, left.source)

    def _same_depth(self, target: str, source: str) -> tuple[str, str]:
        """Step into containers of a single child until both modules own tensors of the same shapes.

        A list of one block is not that block.
        """
        targets, sources = self._signatures[0].single_chain(target), self._signatures[1].single_chain(source)
        wanted = self._signatures[0].own_shapes(target) or self._signatures[1].own_shapes(source)
        for one in targets if wanted else ():
            for other in sources:
                free = one not in self.source_of and other not in self.target_of
                if free and self._signatures[0].own_shapes(one) == self._signatures[1].own_shapes(other) == wanted:
                    return one, other
        return target, source

    def _match_same_structure(self, left: _Unmatched) -> _Unmatched:
        """Match modules of the same structure in their order; names break ties.

        A structure that each side has exactly once needs no order.
        """
        common = self._similarity.signatures(0, left.target) & self._similarity.signatures(1, left.source)
        self._note_lookalikes(left)
        counts = [
            Counter(tree.signature(name) for name in names) for tree, names in zip(self._signatures, left, strict=True)
        ]
        for target in left.target:
            signature = self._signatures[0].signature(target)
            if counts[0][signature] == counts[1][signature] == 1:
                source = next(name for name in left.source if self._signatures[1].signature(name) == signature)
                if self._similarity.same(target, source):
                    self._match(target, source, "same name" if target == source else "structure")
        left = self._unmatched(left.target, left.source)
        alike = [
            [name for name in names if tree.signature(name) in common]
            for tree, names in zip(self._signatures, left, strict=True)
        ]
        self._match_in_order(
            _Unmatched(*alike),
            lambda t, s: self._similarity.same(t, s) * (1 + _NAME_BONUS * (_last_part(t) == _last_part(s))),
        )
        return self._unmatched(left.target, left.source)

    def _note_lookalikes(self, left: _Unmatched) -> None:
        groups: list[dict[object, list[str]]] = [{}, {}]
        for side, (names, tree) in enumerate(zip(left, self._signatures, strict=True)):
            for name in names:
                groups[side].setdefault(tree.signature(name), []).append(name)
        for signature, names in groups[0].items():
            if len(names) == len(groups[1].get(signature, ())):
                self.lookalikes.update(dict.fromkeys(names, names))

    def _match_in_order(self, left: _Unmatched, score: Callable[[str, str], float]) -> _Unmatched:
        """Match the pairs with the highest total score among which no two cross."""
        targets, sources = left.target, left.source
        best = [[0.0] * (len(sources) + 1) for _ in range(len(targets) + 1)]
        scores = [[score(target, source) for source in sources] for target in targets]
        for i in range(len(targets) - 1, -1, -1):
            for j in range(len(sources) - 1, -1, -1):
                matched = scores[i][j] + best[i + 1][j + 1] if scores[i][j] else 0.0
                best[i][j] = max(best[i + 1][j], best[i][j + 1], matched)
        i = j = 0
        while i < len(targets) and j < len(sources):
            if scores[i][j] and best[i][j] == scores[i][j] + best[i + 1][j + 1]:
                self._match(targets[i], sources[j], "same name" if targets[i] == sources[j] else "structure")
                i, j = i + 1, j + 1
            elif best[i][j] == best[i + 1][j]:
                i += 1
            else:
                j += 1
        return self._unmatched(targets, sources)

    # --- what the descent leaves -----------------------------------------------------------------------------------
    def _match_unique_shapes(self) -> None:
        """Match modules with parameters if each side has exactly one left with tensors of these shapes.

        A list of downsampling modules thus finds the one that each stage of the other side holds.
        """
        left = [
            [name for name in outline.modules if name not in matched and name not in packed and tree.own_shapes(name)]
            for outline, matched, packed, tree in zip(
                (self.target, self.source),
                (self.source_of, self.target_of),
                self._packed,
                self._signatures,
                strict=True,
            )
        ]
        counts = [
            Counter(tree.own_shapes(name) for name in names) for tree, names in zip(self._signatures, left, strict=True)
        ]
        for target in left[0]:
            shapes = self._signatures[0].own_shapes(target)
            if counts[0][shapes] == counts[1][shapes] == 1:
                source = next(name for name in left[1] if self._signatures[1].own_shapes(name) == shapes)
                if self._similarity.may_be_same(target, source) and self.related(target, source):
                    self._match(target, source, "structure")
        self._descend()

    def _separate_containers(self) -> None:
        """Undo matches of containers if a module inside one is matched to a module outside the other."""
        for target, source in list(self.source_of.items()):
            if self.how[target] not in ("structure", "elimination", "same name") or self.target.modules[target].tensors:
                continue
            for one, other, matched, outlines in (
                (target, source, self.source_of, (self.target, self.source)),
                (source, target, self.target_of, (self.source, self.target)),
            ):
                inside = [matched[leaf] for leaf in outlines[0].leaves(one) if leaf in matched and leaf != one]
                if any(other not in (leaf, *outlines[1].above(leaf)) for leaf in inside if other):
                    del self.source_of[target], self.target_of[source], self.how[target]
                    self._separated.add(target)
                    break

    def _match_containers(self) -> None:
        """Match a container to the container that holds exactly the counterparts of its leaves."""
        for name in reversed(list(self.target.modules)):
            if name in self.source_of or not self.target.children(name):
                continue
            parts = {self.source_of[leaf] for leaf in self.target.leaves(name) if leaf in self.source_of}
            around = [
                other
                for other in self.source.above(next(iter(parts), ""))
                if other not in self.target_of
                and parts == {n for n in self.source.leaves(other) if n in self.target_of}
            ]
            if around:
                ran = [other for other in around if self.source.modules[other].called is not None]
                self._match(name, (ran or around)[0], "structure")


def _is_descriptive(name: str) -> bool:
    """Whether a name says more than a position in a list."""
    return not _last_part(name).isdecimal()


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]

"""Matches parameters and buffers of two models, and finds the conversion from one layout to the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tensortap.mapping.layouts import LayoutConversion, Shape, same_elements
from tensortap.mapping.module_matches import ModuleMatches
from tensortap.mapping.outline import ModelOutline, TensorOutline, full_name
from tensortap.mapping.patterns import matches, translator
from tensortap.mapping.rules import TensorRule, permute_to, side_of

__all__ = ["TensorMatches"]


@dataclass
class TensorMatches:
    """The tensors of two models that correspond, and those that do not."""

    modules: ModuleMatches
    conversions: dict[str, LayoutConversion] = field(default_factory=dict)
    """Full name of a target tensor → its conversion from source tensors."""
    how: dict[str, str] = field(default_factory=dict)
    """Full name of a target tensor → how the match was found."""
    bessel: set[str] = field(default_factory=set)
    """Target tensors that differ from their counterparts by design, as a variance over n - 1 from one over n."""
    ignored: tuple[dict[str, str], dict[str, str]] = field(default_factory=lambda: ({}, {}))
    """Per side: full name → why it has no counterpart."""
    refused: tuple[dict[str, str], dict[str, str]] = field(default_factory=lambda: ({}, {}))
    """Per side: full name → why its counterpart does not fit."""
    unused: list[TensorRule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._used_sources: set[str] = set()
        self._apply_ignore_rules()
        for rule in self.modules.rules.tensors:
            if not self._match_by_rule(rule):
                self.unused.append(rule)
        for target in self.modules.source_of:
            self._match_by_class(target)
        for target, source in self.modules.source_of.items():
            self._match_by_name(target, source)
            self._match_by_order(target, source)
        if self.modules.rules.structure:
            self._match_unique_shapes()
        names = (full_name(name, own) for name, module in self.modules.target.modules.items() for own in module.tensors)
        self.conversions = {name: self.conversions[name] for name in names if name in self.conversions}

    # --- results ---------------------------------------------------------------------------------------------------
    def left(self, side: int) -> Iterator[tuple[str, str]]:
        """Yield (full name, why) of every tensor of a side without a counterpart.

        A tied tensor counts as matched if the first tensor of its tie is.
        """
        outline = (self.modules.target, self.modules.source)[side]
        matched = (self.modules.source_of, self.modules.target_of)[side]
        done = (self.conversions.keys(), self._used_sources)[side]
        for module in outline.modules.values():
            for own, tensor in module.tensors.items():
                name = full_name(module.name, own)
                if name in done or name in self.ignored[side] or (tensor.tied and tensor.tied in done):
                    continue
                other = matched.get(module.name)
                why = "its module has no counterpart" if other is None else f"{other or '(root)'} has no such tensor"
                yield name, self.refused[side].get(name, why)

    def shared(self, side: int, ties: Mapping[str, str]) -> set[str]:
        """Return the tensors of a side to whose counterparts other tensors are tied."""
        firsts = set(ties.values())
        if side == 0:
            return {name for name, conversion in self.conversions.items() if conversion.parts[0] in firsts}
        return {conversion.parts[0] for name, conversion in self.conversions.items() if name in firsts}

    # --- rules -----------------------------------------------------------------------------------------------------
    def _apply_ignore_rules(self) -> None:
        sides = self.modules.sides
        outlines = ((self.modules.target, sides.target), (self.modules.source, sides.source))
        for side, (outline, labels) in enumerate(outlines):
            for name, module in outline.modules.items():
                rules = [rule for rule in self.modules.rules.ignores if rule.side in labels]
                for rule in rules:
                    if matches(rule.pattern, name):
                        self.ignored[side].update((full_name(name, own), rule.why) for own in module.tensors)
                for own in module.tensors:
                    for rule in rules:
                        if matches(rule.pattern, full_name(name, own)):
                            self.ignored[side].setdefault(full_name(name, own), rule.why)
        for target, source in self.modules.source_of.items():
            if (class_rule := self.modules.class_rule(target)) is None:
                continue
            for rule in class_rule.ignores:
                side = 0 if rule.side in sides.target else 1
                outline, name = ((self.modules.target, target), (self.modules.source, source))[side]
                for own in outline.modules[name].tensors:
                    if matches(rule.pattern, own):
                        self.ignored[side].setdefault(full_name(name, own), rule.why)

    def _match_by_rule(self, rule: TensorRule) -> bool:
        """Return whether the rule matches anything, or concerns other sides."""
        targets, sources = self._names(rule)
        if not targets or not sources:
            return True
        one_target = len(targets) == 1
        one, outline = (targets[0], self.modules.target) if one_target else (sources[0], self.modules.source)
        others = sources if one_target else targets
        used = False
        for module in outline.modules.values():
            for own in module.tensors:
                name = full_name(module.name, own)
                found = [translator(one, other)(name) for other in others]
                if found and None not in found:
                    names = ([name], [str(n) for n in found])
                    used |= self._match_tensors(rule, *(names if one_target else names[::-1]))
        return used

    def _match_by_class(self, target: str) -> None:
        source, rule = self.modules.source_of[target], self.modules.class_rule(target)
        for tensor in rule.tensors if rule is not None else ():
            targets, sources = self._names(tensor)
            names = [full_name(target, name) for name in targets], [full_name(source, name) for name in sources]
            self._match_tensors(tensor, *names)

    def _names(self, rule: TensorRule) -> tuple[Sequence[str], Sequence[str]]:
        sides = self.modules.sides
        return side_of(rule.names, sides.target) or (), side_of(rule.names, sides.source) or ()

    def _match_tensors(self, rule: TensorRule, targets: Sequence[str], sources: Sequence[str]) -> bool:
        """Match all tensors that a rule names if all exist and none has a counterpart yet."""
        known = [self._shapes(self.modules.target, targets), self._shapes(self.modules.source, sources)]
        taken = any(name in self.conversions for name in targets) or bool(self._used_sources & set(sources))
        if None in known[0] or None in known[1] or taken:
            return False
        target_shapes = [shape for shape in known[0] if shape is not None]
        source_shapes = [shape for shape in known[1] if shape is not None]
        permute = permute_to(rule, self.modules.sides.target)
        found, at = {}, 0
        for name, shape in zip(targets, target_shapes, strict=True):
            conversion = LayoutConversion(tuple(sources), permute, rule.axis)
            if len(targets) > 1:
                back = permute.index(rule.axis) if permute else rule.axis
                size = shape[back] if back < len(shape) else 0
                conversion = LayoutConversion(tuple(sources), permute, rule.axis, (at, at + size))
                at += size
            fitting = self._fit(conversion, shape, source_shapes)
            if fitting is None:
                self._refuse(targets, sources, target_shapes, source_shapes)
                return False
            found[name] = fitting
        self.conversions |= found
        self.how |= dict.fromkeys(found, "rule")
        self._used_sources |= set(sources)
        if rule.bessel:
            self.bessel |= set(targets)
        return True

    # --- names, order and shapes -----------------------------------------------------------------------------------
    def _match_by_name(self, target: str, source: str) -> None:
        for own in self.modules.target.modules[target].tensors:
            self._match(full_name(target, own), full_name(source, own), "same name")

    def _match_by_order(self, target: str, source: str) -> None:
        """Match the remaining tensors of two modules in order if both have the same number. Tied tensors follow their
        first.
        """
        targets = [n for n in self.modules.target.modules[target].tensors if self._is_open(0, full_name(target, n))]
        sources = [n for n in self.modules.source.modules[source].tensors if self._is_open(1, full_name(source, n))]
        if len(targets) == len(sources):
            for one, other in zip(targets, sources, strict=True):
                self._match(full_name(target, one), full_name(source, other), "order")

    def _match_unique_shapes(self) -> None:
        """Match tensors below matched modules if each side has exactly one of a shape left there."""
        left = [
            [
                (module.name, own, tensor)
                for module in outline.modules.values()
                for own, tensor in module.tensors.items()
                if tensor.shape and not tensor.tied and self._is_open(side, full_name(module.name, own))
            ]
            for side, outline in enumerate((self.modules.target, self.modules.source))
        ]

        def fits(target: tuple[str, str, TensorOutline], source: tuple[str, str, TensorOutline]) -> bool:
            same = target[2].shape == source[2].shape and target[2].kind == source[2].kind
            return same and self.modules.related(target[0], source[0])

        for target in left[0]:
            found = [source for source in left[1] if fits(target, source)]
            if len(found) == 1 and sum(fits(other, found[0]) for other in left[0]) == 1:
                self._match(full_name(*target[:2]), full_name(*found[0][:2]), "shape")

    def _is_free(self, side: int, name: str) -> bool:
        used = self.conversions.keys() if side == 0 else self._used_sources
        return name not in used and name not in self.ignored[side] and name not in self.refused[side]

    def _is_open(self, side: int, name: str) -> bool:
        """Whether a tensor has no counterpart yet, under any of its names."""
        if side == 0:
            return self._is_free(0, name) and self.modules.target.tensor(name).tied not in self.conversions
        return self._is_free(1, name) and self.modules.source.tensor(name).tied not in self._used_sources

    def _match(self, target: str, source: str, how: str) -> None:
        target_shape = self._shapes(self.modules.target, [target])[0]
        source_shape = self._shapes(self.modules.source, [source])[0]
        if target_shape is None or source_shape is None or not self._is_free(0, target) or not self._is_free(1, source):
            return
        conversion = self._fit(LayoutConversion((source,)), target_shape, [source_shape])
        if conversion is None and len(target_shape) == 2:
            conversion = self._fit(LayoutConversion((source,), (1, 0)), target_shape, [source_shape])
            how = "shape"
        if conversion is None:
            self._refuse([target], [source], [target_shape], [source_shape])
            return
        self.conversions[target], self.how[target] = conversion, how
        self._used_sources.add(source)

    def _fit(self, conversion: LayoutConversion, shape: Shape, sources: Sequence[Shape]) -> LayoutConversion | None:
        """Return the conversion if it yields the shape, or the identity if that does; else None.

        The identity fits user classes whose layout differs from the rule's class.
        """
        identity = LayoutConversion(conversion.parts)
        for each in (conversion, identity) if len(sources) == 1 and conversion.cut is None else (conversion,):
            found = each.result(sources)
            if found is not None and (found == shape or same_elements(found, shape)):
                return LayoutConversion(each.parts, each.permute, each.axis, each.cut, shape)
        return None

    def _refuse(
        self,
        targets: Sequence[str],
        sources: Sequence[str],
        target_shapes: Sequence[Shape],
        source_shapes: Sequence[Shape],
    ) -> None:
        for side, (names, shapes, others, other_shapes) in enumerate(
            ((targets, target_shapes, sources, source_shapes), (sources, source_shapes, targets, target_shapes))
        ):
            against = ", ".join(f"{_sizes(s)} of {n}" for n, s in zip(others, other_shapes, strict=True))
            for name, shape in zip(names, shapes, strict=True):
                self.refused[side].setdefault(name, f"its shape {_sizes(shape)} does not fit {against}")

    @staticmethod
    def _shapes(outline: ModelOutline, names: Sequence[str]) -> list[Shape | None]:
        return [None if outline.find(name) is None else outline.tensor(name).shape for name in names]


def _sizes(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "scalar"

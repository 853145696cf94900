"""Maps one model's modules, tensors and values to another's, from two outlines and the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tensortap.core.name_mapping import MappedName, NameMapping, UnmappedName
from tensortap.core.records import STATE_KINDS, display_name
from tensortap.mapping.layouts import LayoutConversion
from tensortap.mapping.module_matches import ModuleMatches
from tensortap.mapping.outline import ModelOutline, full_name
from tensortap.mapping.patterns import matches
from tensortap.mapping.rules import Rules, Sides
from tensortap.mapping.rules_file import shipped_rules
from tensortap.mapping.tensor_matches import TensorMatches
from tensortap.mapping.value_matches import ValueMatch, Values, match_values

__all__ = ["ModelMapping", "map_models"]

_ROLES = ("reference", "candidate")


@dataclass(frozen=True)
class ModelMapping:
    """The source model's names and tensor layouts in terms of the target model's."""

    module_matches: ModuleMatches
    tensor_matches: TensorMatches
    value_matches: dict[tuple[str, str, str], ValueMatch]
    """By source module, kind and path; only values that differ in path or layout."""
    values: tuple[Values, Values]

    @property
    def modules(self) -> dict[str, str]:
        """Source module → target module."""
        return self.module_matches.target_of

    @cached_property
    def ties(self) -> tuple[dict[str, str], dict[str, str]]:
        """Per side: the tensors tied on that side only, by the other side's name, and the tensors that they are tied
        to.
        """
        found: tuple[dict[str, str], dict[str, str]] = ({}, {})
        target, source = self._outlines
        for name, conversion in self.tensor_matches.conversions.items():
            tied = target.tensor(name).tied, source.tensor(conversion.parts[0]).tied
            if tied[0] and not tied[1]:
                found[0][conversion.parts[0]] = tied[0]
            elif tied[1] and not tied[0]:
                found[1][name] = tied[1]
        return found

    @property
    def unused(self) -> list[str]:
        """Rules that match nothing, by their position in the file."""
        return [rule.where for rule in self.module_matches.unused] + [rule.where for rule in self.tensor_matches.unused]

    def why(self, side: int, module: str, kind: str, path: str) -> str:
        """Return why a record of a side (0 target, 1 source) has no counterpart."""
        matched, other = self._matched[side], _ROLES[1 - side]
        if module not in matched:
            return self._why_module(side, module)
        if kind in STATE_KINDS:
            refused = self.tensor_matches.refused[side].get(full_name(module, path))
            if tie := self.ties[1 - side].get(full_name(module, path)):
                return f"the {other} ties it to {tie}"
            shared = self.tensor_matches.shared(side, self.ties[1 - side])
            if kind in ("param_grad", "step_grad") and full_name(module, path) in shared:
                return f"the {other}'s is the sum over all tensors tied to it"
            return refused or f"the {other}'s {display_name(matched[module])} has no such tensor"
        if (matched[module], kind.removeprefix("grad_")) not in self.values[1 - side]:
            return f"the {other}'s {display_name(matched[module])} was not called"
        return f"the {other}'s {display_name(matched[module])} has no such {kind}"

    def ignored(self, side: int, module: str, kind: str, path: str) -> bool:
        """Whether a rule leaves a record out."""
        if kind in STATE_KINDS:
            return full_name(module, path) in self.tensor_matches.ignored[side]
        sides, rules = self.module_matches.sides, self.module_matches.rules
        labels = (sides.target, sides.source)[side]
        return any(rule.side in labels and matches(rule.pattern, module) for rule in rules.ignores)

    def report(self) -> NameMapping:
        """Return the mapping as plain data; the target is the reference."""
        modules, tensors = self.module_matches, self.tensor_matches
        return NameMapping(
            modules=[MappedName(target, source, modules.how[target]) for target, source in modules.source_of.items()],
            tensors=[
                MappedName(target, " + ".join(conversion.parts), tensors.how[target], conversion.words())
                for target, conversion in tensors.conversions.items()
            ],
            values=[
                MappedName(
                    f"{display_name(self.modules[module])} {kind} {match.path}",
                    f"{display_name(module)} {kind} {path}",
                    match.how,
                    LayoutConversion((), match.permute).words(),
                )
                for (module, kind, path), match in self.value_matches.items()
            ],
            left=[*self._left(0), *self._left(1)],
            ignored=[
                UnmappedName(role, name, why)
                for side, role in enumerate(_ROLES)
                for name, why in tensors.ignored[side].items()
            ],
            unused=self.unused,
        )

    @property
    def _outlines(self) -> tuple[ModelOutline, ModelOutline]:
        return self.module_matches.target, self.module_matches.source

    @property
    def _matched(self) -> tuple[dict[str, str], dict[str, str]]:
        return self.module_matches.source_of, self.module_matches.target_of

    def _left(self, side: int) -> Iterator[UnmappedName]:
        """Yield names without a counterpart; for a subtree that lacks one for one reason, only its uppermost module."""
        outline, matched = self._outlines[side], self._matched[side]
        for name in outline.modules:
            if name in matched or self.ignored(side, name, "output", ""):
                continue
            above, why = outline.parent(name), self._why_module(side, name)
            if above in matched or why != self._why_module(side, above):
                yield UnmappedName(_ROLES[side], name, why)
        for name, why in self.tensor_matches.left(side):
            if name.rpartition(".")[0] in matched:
                yield UnmappedName(_ROLES[side], name, why)

    def _why_module(self, side: int, name: str) -> str:
        outline, matched = self._outlines[side], self._matched[side]
        around = next((above for above in outline.above(name) if above in matched), "")
        other = _ROLES[1 - side]
        if around in matched:
            target = around if side == 0 else matched[around]
            packed = self.module_matches.packed(target)[side]
            if any(name == part or name.startswith(f"{part}.") for part in packed):
                return f"the {other}'s {display_name(matched[around])} packs its weights differently"
            rule = self.module_matches.class_rule(target)
            if rule is not None and rule.whole:
                return f"part of {display_name(around)}, which is a single module in the {other}"
        if any(leaf in matched for leaf in outline.leaves(name)):
            return f"a container that the {other} does not have; its modules are mapped"
        return f"no unmapped module in the {other}'s {display_name(matched.get(around, ''))} resembles it"


def map_models(
    target: ModelOutline,
    source: ModelOutline,
    rules: Rules | None = None,
    roles: tuple[str, str] = _ROLES,
    rename: Callable[[str], str] | None = None,
    values: tuple[Values, Values] | None = None,
    known: Mapping[str, str] | None = None,
) -> ModelMapping:
    """Map the source model's modules, tensors and values to the target's.

    roles: names that rules may use for the target and the source, besides their frameworks.
    known: source modules, and the target modules that their values have identified.

    The rules that ship with tensortap are added if the frameworks differ.
    """
    sides = Sides((target.framework, roles[0]), (source.framework, roles[1]))
    if target.framework == source.framework:
        sides = Sides((roles[0],), (roles[1],))
    table = rules or Rules()
    if target.framework != source.framework:
        table = table + shipped_rules()
    modules = ModuleMatches(target, source, table, sides, rename, known)
    value_matches = match_values(modules, *values) if values is not None else {}
    return ModelMapping(modules, TensorMatches(modules), value_matches, values or ({}, {}))

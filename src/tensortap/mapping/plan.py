"""All of it together: two outlines and the rules in, who belongs to whom out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tensortap.core.name_mapping import MappedName, NameMapping, UnmappedName
from tensortap.core.records import STATE_KINDS, display_name
from tensortap.mapping.layouts import Reading
from tensortap.mapping.outline import Outline, full_name
from tensortap.mapping.patterns import matches
from tensortap.mapping.places import Places
from tensortap.mapping.rules import Rules, Sides
from tensortap.mapping.rules_file import shipped_rules
from tensortap.mapping.tensors import Tensors
from tensortap.mapping.values import Flow, Values, pair_values

__all__ = ["Plan", "plan"]
_ROLES = ("reference", "candidate")


@dataclass(frozen=True)
class Plan:
    """What of the given side belongs to what of the made one, in whose terms it is to be read."""

    places: Places
    tensors: Tensors
    flows: dict[tuple[str, str, str], Flow]
    values: tuple[Values, Values]

    @property
    def modules(self) -> dict[str, str]:
        """The given side's modules by name, and what the made side calls them."""
        return self.places.of_given

    @cached_property
    def ties(self) -> tuple[dict[str, str], dict[str, str]]:
        """Per side: tensors that are tied there and not on the other side, by the other side's name, and to what."""
        found: tuple[dict[str, str], dict[str, str]] = ({}, {})
        made, given = self.places.made, self.places.given
        for name, reading in self.tensors.readings.items():
            tied = made.tensor(name).tied, given.tensor(reading.parts[0]).tied
            if tied[0] and not tied[1]:
                found[0][reading.parts[0]] = tied[0]
            elif tied[1] and not tied[0]:
                found[1][name] = tied[1]
        return found

    @property
    def unused(self) -> list[str]:
        """Rules that fitted nothing, by where they stand."""
        return [rule.where for rule in self.places.unused] + [rule.where for rule in self.tensors.unused]

    def why(self, side: int, module: str, kind: str, path: str) -> str:
        """Why a record of a side (0 made, 1 given) has no counterpart; empty if that is not known."""
        placed, other = (self.places.of_made, self.places.of_given)[side], _ROLES[1 - side]
        if module not in placed:
            return self._why_module(side, module)
        if kind in STATE_KINDS:
            refused = self.tensors.refused[side].get(full_name(module, path))
            if tie := self.ties[1 - side].get(full_name(module, path)):
                return f"the {other} ties it to {tie}"
            if kind == "param_grad" and full_name(module, path) in self.tensors.shared(side, self.ties[1 - side]):
                return f"the {other}'s is a sum over all that is tied to it"
            return refused or f"the {other}'s {display_name(placed[module])} has no such tensor"
        if (placed[module], kind.removeprefix("grad_")) not in self.values[1 - side]:
            return f"the {other}'s {display_name(placed[module])} was not called"
        return f"the {other}'s {display_name(placed[module])} has no such {kind}"

    def ignored(self, side: int, module: str, kind: str, path: str) -> bool:
        """Whether a record is left out by a rule."""
        if kind in STATE_KINDS:
            return full_name(module, path) in self.tensors.ignored[side]
        labels = (self.places.sides.made, self.places.sides.given)[side]
        return any(rule.side in labels and matches(rule.pattern, module) for rule in self.places.rules.ignores)

    def report(self) -> NameMapping:
        """For people and programs; the made side is the reference."""
        places, tensors = self.places, self.tensors
        return NameMapping(
            modules=[MappedName(made, given, places.how[made]) for made, given in places.of_made.items()],
            tensors=[
                MappedName(made, " + ".join(reading.parts), tensors.how[made], reading.words())
                for made, reading in tensors.readings.items()
            ],
            values=[
                MappedName(
                    f"{display_name(self.modules[module])} {kind} {flow.path}",
                    f"{display_name(module)} {kind} {path}",
                    flow.how,
                    Reading((), flow.permute).words(),
                )
                for (module, kind, path), flow in self.flows.items()
            ],
            left=[*self._left(0), *self._left(1)],
            ignored=[
                UnmappedName(role, name, why)
                for side, role in enumerate(_ROLES)
                for name, why in tensors.ignored[side].items()
            ],
            unused=self.unused,
        )

    def _left(self, side: int) -> Iterator[UnmappedName]:
        outline = (self.places.made, self.places.given)[side]
        placed = (self.places.of_made, self.places.of_given)[side]
        for name in outline.modules:
            if name in placed or self.ignored(side, name, "output", ""):
                continue
            above, why = outline.parent(name), self._why_module(side, name)
            if above in placed or why != self._why_module(side, above):
                yield UnmappedName(_ROLES[side], name, why)
        for name, why in self.tensors.left(side):
            if name.rpartition(".")[0] in placed:
                yield UnmappedName(_ROLES[side], name, why)

    def _why_module(self, side: int, name: str) -> str:
        outline = (self.places.made, self.places.given)[side]
        placed = (self.places.of_made, self.places.of_given)[side]
        around = next((above for above in outline.above(name) if above in placed), "")
        other = _ROLES[1 - side]
        if around in placed:
            made = around if side == 0 else placed[around]
            if any(name == part or name.startswith(f"{part}.") for part in self.places.packed(made)[side]):
                return f"the {other}'s {display_name(placed[around])} packs its weights otherwise"
            rule = self.places.class_rule(made)
            if rule is not None and rule.whole:
                return f"a part of {display_name(around)}, which the {other} has in one"
        if any(leaf in placed for leaf in outline.leaves(name)):
            return f"a level that the {other} does not have; what it holds is placed"
        return f"nothing left in the {other}'s {display_name(placed.get(around, ''))} is like it"


def plan(
    made: Outline,
    given: Outline,
    rules: Rules | None = None,
    roles: tuple[str, str] = _ROLES,
    rename: Callable[[str], str] | None = None,
    values: tuple[Values, Values] | None = None,
    known: Mapping[str, str] | None = None,
) -> Plan:
    """Place the given outline's modules, tensors and values in the made one. `roles` are what rules may call them
    beside their frameworks; the rules that ship are added where the frameworks differ. `known` are modules of the given
    side that values have shown to be modules of the made one."""
    sides = Sides((made.framework, roles[0]), (given.framework, roles[1]))
    if made.framework == given.framework:
        sides = Sides((roles[0],), (roles[1],))
    table = rules or Rules()
    if made.framework != given.framework:
        table = table + shipped_rules()
    places = Places(made, given, table, sides, rename, known)
    flows = pair_values(places, *values) if values is not None else {}
    return Plan(places, Tensors(places), flows, values or ({}, {}))

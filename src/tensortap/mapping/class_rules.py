"""Finds the rule for the classes of two modules: one of the table, or one derived from packed projections.

A module may hold query, key and value in one Linear where the other side has three. Names and shapes identify them:
`c_attn` of GPT-2 and `qkv` of vision transformers hold the three one after the other. `query_key_value` of GPT-NeoX
interleaves them by head. Neither names nor shapes show the interleaving, so such layouts need a rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensortap.mapping.layouts import Shape
from tensortap.mapping.outline import ModelOutline, full_name
from tensortap.mapping.rules import ClassRule, Rules, Sides, TensorRule, side_of

__all__ = ["ClassRules", "find_triples", "packed_modules"]

_CONCATENATED = ("c_attn", "in_proj", "qkv", "to_qkv")
"""Names of Linears that hold query, key and value one after the other."""
_ROLES = (("query", "key", "value"), ("q", "k", "v"))
Triple = tuple[str, str, str]


class ClassRules:
    """The rules for the classes of pairs of modules."""

    def __init__(self, target: ModelOutline, source: ModelOutline, rules: Rules, sides: Sides) -> None:
        self._outlines, self._rules, self._sides = (target, source), rules, sides
        self._projections = _Projections(target, sides.target, rules), _Projections(source, sides.source, rules)
        self._found: dict[tuple[str, str], ClassRule | None] = {}

    def find(self, target: str, source: str) -> ClassRule | None:
        """Return the first rule for the classes of two modules; None if neither table nor packing has one."""
        if (target, source) not in self._found:
            self._found[target, source] = self._in_table(target, source) or self._from_packing(target, source)
        return self._found[target, source]

    def _in_table(self, target: str, source: str) -> ClassRule | None:
        labels, names = (self._sides.target, self._sides.source), (target, source)
        classes = [outline.modules[name].classes for outline, name in zip(self._outlines, names, strict=True)]
        for rule in self._rules.classes:
            listed = [rule.names_class(*each) for each in zip(labels, classes, strict=True)]
            if all(listed):
                return rule
            # A rule for any class requires the tensors that it names.
            allowed = [found or side_of(rule.names, own) == ("*",) for found, own in zip(listed, labels, strict=True)]
            if any(listed) and all(allowed) and self._has_tensors(rule, names):
                return rule
        return None

    def _has_tensors(self, rule: ClassRule, names: tuple[str, str]) -> bool:
        for outline, name, labels in zip(self._outlines, names, (self._sides.target, self._sides.source), strict=True):
            wanted = side_of(rule.tensors[0].names, labels) or ()
            if any(outline.find(full_name(name, tensor)) is None for tensor in wanted):
                return False
        return True

    def _from_packing(self, target: str, source: str) -> ClassRule | None:
        """Return a rule for the tensors below two modules; None if nothing is packed, or the packing is ambiguous."""
        ours, theirs = self._projections
        found = _packing_rules(ours, target, theirs, source) or _packing_rules(theirs, source, ours, target)
        return ClassRule({}, tuple(found), where="packing") if found else None


def packed_modules(rule: ClassRule, around: tuple[str, str], sides: Sides) -> tuple[set[str], set[str]]:
    """Return the modules below two modules whose tensors the other side owns directly or packs differently."""
    found: tuple[set[str], set[str]] = (set(), set())
    for tensor in rule.tensors:
        names = [side_of(tensor.names, labels) or () for labels in (sides.target, sides.source)]
        for side, (own, others) in enumerate((names, names[::-1])):
            if len(own) != len(others) or not any("." in name for name in others):
                found[side].update(full_name(around[side], n.rpartition(".")[0]) for n in own if "." in n)
    return found


class _Projections:
    """The query, key and value Linears of one outline."""

    def __init__(self, outline: ModelOutline, labels: tuple[str, ...], rules: Rules) -> None:
        self.outline, self.labels, self._rules = outline, labels, rules
        self._found: dict[str, tuple[list[str], list[Triple]]] = {}

    def below(self, name: str) -> tuple[list[str], list[Triple]]:
        """Return the packed leaves below a module, and the triples of separate ones, by their names relative to it."""
        if name not in self._found:
            skip = len(name) + 1 if name else 0
            leaves = [leaf[skip:] for leaf in self.outline.leaves(name) if leaf != name]
            packed = [leaf for leaf in leaves if leaf.rpartition(".")[2] in _CONCATENATED]
            self._found[name] = packed, list(find_triples(leaves))
        return self._found[name]

    def shapes(self, leaf: str) -> dict[str, Shape]:
        return {own: tensor.shape for own, tensor in self.outline.modules[leaf].tensors.items()}

    def outputs_axis(self, leaf: str) -> int | None:
        """Return the axis of a Linear's weight along which its outputs lie; None if the class is unknown."""
        return self._rules.outputs_axis(self.labels, self.outline.modules[leaf].classes)


def _packing_rules(whole: _Projections, one: str, apart: _Projections, other: str) -> list[TensorRule]:
    """Return rules for tensors that are one below `one` and three below `other`."""
    packed, separate = whole.below(one)[0], apart.below(other)[1]
    if len(packed) != 1 or len(separate) != 1:
        return []
    shapes, leaves = whole.shapes(full_name(one, packed[0])), [full_name(other, name) for name in separate[0]]
    weight = shapes.get("weight", ())
    axis = next((axis for axis, size in enumerate(weight) if len(weight) == 2 and size == 3 * weight[1 - axis]), None)
    axes = {apart.outputs_axis(leaf) for leaf in leaves}
    if axis is None or len(axes) != 1 or None in axes or any(apart.shapes(n).keys() != shapes.keys() for n in leaves):
        return []

    def names(own: str) -> dict[str, tuple[str, ...]]:
        parts = tuple(full_name(name, own) for name in separate[0])
        return {whole.labels[0]: (full_name(packed[0], own),), apart.labels[0]: parts}

    found = [TensorRule(names("weight"), (1, 0) if axes != {axis} else (), axis, where="packing")]
    return [*found, TensorRule(names("bias"), where="packing")] if "bias" in shapes else found


def find_triples(names: Sequence[str]) -> Iterator[Triple]:
    """Yield names that differ in one word only, which is query, key and value, or q, k and v."""
    known, found = set(names), set()
    for query, key, value in _ROLES:
        for name in names:
            at = name.find(query)
            while at >= 0:
                before, after = name[:at], name[at + len(query) :]
                triple = (name, f"{before}{key}{after}", f"{before}{value}{after}")
                if known.issuperset(triple) and triple not in found:
                    found.add(triple)
                    yield triple
                at = name.find(query, at + 1)

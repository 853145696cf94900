"""Query, key and value in one Linear on one side and in three on the other, found by names and shapes.

`c_attn` of GPT-2 and `qkv` of vision transformers hold the three one after the other. Others, as `query_key_value` of
GPT-NeoX, hold them head by head; nothing in names or shapes tells that, so those are left to rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensortap.mapping.layouts import Shape
from tensortap.mapping.outline import Outline, full_name
from tensortap.mapping.rules import ClassRule, Rules, Sides, TensorRule

__all__ = ["Packing", "triples"]

_ONE_AFTER_THE_OTHER = ("c_attn", "in_proj", "qkv", "to_qkv")
_ROLES = (("query", "key", "value"), ("q", "k", "v"))
Triple = tuple[str, str, str]


class Packing:
    """Finds what two outlines pack differently."""

    def __init__(self, made: Outline, given: Outline, rules: Rules, sides: Sides) -> None:
        self._sides = _Side(made, sides.made, rules), _Side(given, sides.given, rules)

    def rule(self, made: str, given: str) -> ClassRule | None:
        """A rule for the tensors below two modules; None if nothing is packed, or it can be read in several ways."""
        ours, theirs = self._sides
        found = _tensors(ours, made, theirs, given) or _tensors(theirs, given, ours, made)
        return ClassRule({}, tuple(found), where="packing") if found else None


class _Side:
    """The Linears of one outline."""

    def __init__(self, outline: Outline, labels: tuple[str, ...], rules: Rules) -> None:
        self.outline, self.labels, self._rules = outline, labels, rules
        self._known: dict[str, tuple[list[str], list[Triple]]] = {}

    def below(self, name: str) -> tuple[list[str], list[Triple]]:
        """Leaves that hold a query, a key and a value, and three that are one each, by their names from a module on."""
        if name not in self._known:
            skip = len(name) + 1 if name else 0
            leaves = [leaf[skip:] for leaf in self.outline.leaves(name) if leaf != name]
            packed = [leaf for leaf in leaves if leaf.rpartition(".")[2] in _ONE_AFTER_THE_OTHER]
            self._known[name] = packed, list(triples(leaves))
        return self._known[name]

    def shapes(self, leaf: str) -> dict[str, Shape]:
        return {own: tensor.shape for own, tensor in self.outline.modules[leaf].tensors.items()}

    def outputs_axis(self, leaf: str) -> int | None:
        """Along which axis of a Linear's weight its outputs lie; None if its class is not known."""
        return self._rules.outputs_axis(self.labels, self.outline.modules[leaf].classes)


def _tensors(whole: _Side, one: str, apart: _Side, other: str) -> list[TensorRule]:
    """Rules for what is one tensor below `one`, and three below `other`."""
    packed, threes = whole.below(one)[0], apart.below(other)[1]
    if len(packed) != 1 or len(threes) != 1:
        return []
    shapes, leaves = whole.shapes(full_name(one, packed[0])), [full_name(other, name) for name in threes[0]]
    weight = shapes.get("weight", ())
    axis = next((axis for axis, size in enumerate(weight) if len(weight) == 2 and size == 3 * weight[1 - axis]), None)
    axes = {apart.outputs_axis(leaf) for leaf in leaves}
    if axis is None or len(axes) != 1 or None in axes or any(apart.shapes(n).keys() != shapes.keys() for n in leaves):
        return []
    names = [_names(whole, apart, packed[0], threes[0], own) for own in ("weight", "bias")]
    found = [TensorRule(names[0], (1, 0) if axes != {axis} else (), axis, where="packing")]
    return [*found, TensorRule(names[1], where="packing")] if "bias" in shapes else found


def _names(whole: _Side, apart: _Side, one: str, three: Sequence[str], own: str) -> dict[str, tuple[str, ...]]:
    return {whole.labels[0]: (full_name(one, own),), apart.labels[0]: tuple(full_name(name, own) for name in three)}


def triples(names: Sequence[str]) -> Iterator[Triple]:
    """Names that differ in one word alone, which is query, key and value, or q, k and v."""
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

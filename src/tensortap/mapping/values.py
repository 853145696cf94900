"""What goes in and comes out of modules that belong together: which argument is which, and how its axes lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tensortap.mapping.layouts import Shape, common_shape
from tensortap.mapping.patterns import matches, translator
from tensortap.mapping.places import Places
from tensortap.mapping.rules import ValueRule, permute_to, side_of

__all__ = ["Flow", "Values", "pair_values", "turned"]

Values = Mapping[tuple[str, str], Mapping[str, Shape]]
"""(module, "input" or "output") → path → shape, in the order they were seen."""


class Flow(NamedTuple):
    """Where a value of the given side belongs."""

    path: str
    """On the side that is made."""
    permute: tuple[int, ...]
    how: str


def pair_values(places: Places, made: Values, given: Values) -> dict[tuple[str, str, str], Flow]:
    """(given module, kind, path) → where it belongs, for those that differ in path or layout."""
    found: dict[tuple[str, str, str], Flow] = {}
    for ours, theirs in places.of_made.items():
        for kind in ("input", "output"):
            left, right = made.get((ours, kind), {}), given.get((theirs, kind), {})
            flows = _by_rules(places, (ours, theirs), kind, left, right)
            taken = {flow.path for flow in flows.values()}
            same = [path for path in right if path in left and path not in {*taken, *flows}]
            flows |= {path: Flow(path, turned(left[path], right[path]), "same") for path in same}
            taken = {flow.path for flow in flows.values()}
            ours_left, theirs_left = [p for p in left if p not in taken], [p for p in right if p not in flows]
            ours_shapes, theirs_shapes = [left[p] for p in ours_left], [right[p] for p in theirs_left]
            if _agree(ours_shapes, theirs_shapes):  # the same arguments under other names
                pairs = zip(ours_left, theirs_left, strict=True)
                flows |= {other: Flow(path, (), "order") for path, other in pairs}
            found |= {(theirs, kind, path): flow for path, flow in flows.items() if flow != (path, (), "same")}
    return found


def _agree(made: list[Shape], given: list[Shape]) -> bool:
    """Whether all shapes are the same, but for axes that one side may repeat."""
    return len(made) == len(given) and all(
        common_shape(left, right) is not None for left, right in zip(made, given, strict=True)
    )


def turned(made: Shape, given: Shape) -> tuple[int, ...]:
    """The axes of a value in the order that its shape shows: batch and sequence, or the channels, may have changed
    places. Empty if the shapes agree, or show nothing of the kind."""
    if made == given or len(made) != len(given) or len(given) < 2:
        return ()
    first, *others = range(len(given))
    turns = [(others[0], first, *others[1:])]
    if len(given) > 2:
        turns += [(first, others[-1], *others[:-1]), (first, *others[1:], others[0])]
    fitting = {turn for turn in turns if tuple(given[axis] for axis in turn) == made}
    return fitting.pop() if len(fitting) == 1 else ()


def _by_rules(
    places: Places, names: tuple[str, str], kind: str, left: Mapping[str, Shape], right: Mapping[str, Shape]
) -> dict[str, Flow]:
    rule_of_class = places.class_rule(names[0])
    found: dict[str, Flow] = {}
    for rule in (*places.rules.values, *(rule_of_class.values if rule_of_class is not None else ())):
        for path, shape in right.items():
            ours = _translated(rule, places, names, kind, path)
            if ours is None or ours not in left or path in found:
                continue
            permute = permute_to(rule, places.sides.made)
            found[path] = Flow(ours, permute if len(permute) == len(shape) else turned(left[ours], shape), "rule")
    return found


def _translated(rule: ValueRule, places: Places, names: tuple[str, str], kind: str, path: str) -> str | None:
    """The made side's path for a path of the given side, if the rule is about it."""
    ours, theirs = side_of(rule.names, places.sides.made), side_of(rule.names, places.sides.given)
    if ours is None or theirs is None:
        return None
    *our_module, our_kind, our_path = ours.split(" ")
    *their_module, their_kind, their_path = theirs.split(" ")
    about = all(matches(pattern, name) for pattern, name in zip((*our_module, *their_module), names, strict=False))
    return translator(their_path, our_path)(path) if about and our_kind == their_kind == kind else None

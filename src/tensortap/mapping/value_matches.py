"""Matches inputs and outputs of matched modules: their paths, and the order of their axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tensortap.mapping.layouts import Shape, common_shape
from tensortap.mapping.module_matches import ModuleMatches
from tensortap.mapping.patterns import matches, translator
from tensortap.mapping.rules import ValueRule, permute_to, side_of

__all__ = ["ValueMatch", "Values", "find_permutation", "match_values"]

Values = Mapping[tuple[str, str], Mapping[str, Shape]]
"""(module, "input" or "output") → path → shape, in the order of recording."""


class ValueMatch(NamedTuple):
    """The target path of a source value, and its change of layout."""

    path: str
    permute: tuple[int, ...]
    how: str


def match_values(modules: ModuleMatches, target: Values, source: Values) -> dict[tuple[str, str, str], ValueMatch]:
    """Map (source module, kind, path) to its match, for values that differ in path or layout."""
    result: dict[tuple[str, str, str], ValueMatch] = {}
    for target_module, source_module in modules.source_of.items():
        for kind in ("input", "output"):
            left, right = target.get((target_module, kind), {}), source.get((source_module, kind), {})
            found = _match_by_rules(modules, (target_module, source_module), kind, left, right)
            used = {match.path for match in found.values()}
            same = [path for path in right if path in left and path not in {*used, *found}]
            found |= {path: ValueMatch(path, find_permutation(left[path], right[path]), "same") for path in same}
            used = {match.path for match in found.values()}
            left_over, right_over = [p for p in left if p not in used], [p for p in right if p not in found]
            if _shapes_agree([left[p] for p in left_over], [right[p] for p in right_over]):  # renamed arguments
                pairs = zip(left_over, right_over, strict=True)
                found |= {other: ValueMatch(path, (), "order") for path, other in pairs}
            result |= {
                (source_module, kind, path): match for path, match in found.items() if match != (path, (), "same")
            }
    return result


def _shapes_agree(target: list[Shape], source: list[Shape]) -> bool:
    """Whether all shapes are equal, up to axes that one side may broadcast."""
    return len(target) == len(source) and all(
        common_shape(left, right) is not None for left, right in zip(target, source, strict=True)
    )


def find_permutation(target: Shape, source: Shape) -> tuple[int, ...]:
    """Return the permutation of a value's axes that its shape shows.

    Batch and sequence may be swapped, or channels first or last. The result is empty if the shapes agree, or if no such
    permutation is the only one.
    """
    if target == source or len(target) != len(source) or len(source) < 2:
        return ()
    first, *others = range(len(source))
    candidates = [(others[0], first, *others[1:])]
    if len(source) > 2:
        candidates += [(first, others[-1], *others[:-1]), (first, *others[1:], others[0])]
    fitting = {axes for axes in candidates if tuple(source[axis] for axis in axes) == target}
    return fitting.pop() if len(fitting) == 1 else ()


def _match_by_rules(
    modules: ModuleMatches, names: tuple[str, str], kind: str, left: Mapping[str, Shape], right: Mapping[str, Shape]
) -> dict[str, ValueMatch]:
    class_rule = modules.class_rule(names[0])
    found: dict[str, ValueMatch] = {}
    for rule in (*modules.rules.values, *(class_rule.values if class_rule is not None else ())):
        for path, shape in right.items():
            target = _translate(rule, modules, names, kind, path)
            if target is None or target not in left or path in found:
                continue
            permute = permute_to(rule, modules.sides.target)
            fitting = permute if len(permute) == len(shape) else find_permutation(left[target], shape)
            found[path] = ValueMatch(target, fitting, "rule")
    return found


def _translate(rule: ValueRule, modules: ModuleMatches, names: tuple[str, str], kind: str, path: str) -> str | None:
    """Return the target path for a source path; None if the rule does not apply to it."""
    target, source = side_of(rule.names, modules.sides.target), side_of(rule.names, modules.sides.source)
    if target is None or source is None:
        return None
    *target_module, target_kind, target_path = target.split(" ")
    *source_module, source_kind, source_path = source.split(" ")
    patterns = (*target_module, *source_module)
    applies = all(matches(pattern, name) for pattern, name in zip(patterns, names, strict=False))
    return translator(source_path, target_path)(path) if applies and target_kind == source_kind == kind else None

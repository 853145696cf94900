"""Names of a stage's layers and of a rank's experts in the whole model, from the numbers that modules know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["global_expert_names", "global_layer_names"]

_NUMBERS = (("layer_number", 1), ("layer_idx", 0), ("layer_id", 0), ("layer_index", 0))
"""Attributes of a layer or of its direct children that hold its number in the whole model, and the first number."""


def global_layer_names(modules: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
    """Return the global names of numbered modules, such as layers.0 of the second stage, by their own names.

    All layers of a list must know their numbers, and these must be consecutive: otherwise nothing is renamed.
    """
    lists: dict[str, dict[int, tuple[str, Any]]] = {}
    for name, module in modules:
        container, _, last = name.rpartition(".")
        if last.isdecimal():
            lists.setdefault(container, {})[int(last)] = name, module
    found = {}
    for container, layers in lists.items():
        numbers = {own: _number_of(module) for own, (_, module) in layers.items()}
        shifts = {number - own for own, number in numbers.items() if number is not None}
        if None in numbers.values() or len(shifts) != 1 or (shift := shifts.pop()) <= 0:
            continue
        for own, (name, _) in layers.items():
            found[name] = f"{container}.{own + shift}" if container else str(own + shift)
    return found


def global_expert_names(modules: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
    """Return the global names of experts of which each process holds some, by their own names.

    A module around them must know their numbers in the whole, as Megatron's do (`local_expert_indices`), and have one
    list of as many modules. Names that stay the same are included: other processes have other experts under them.
    """
    named = list(modules)
    lists: dict[str, dict[int, str]] = {}
    for name, _ in named:
        container, _, last = name.rpartition(".")
        if last.isdecimal():
            lists.setdefault(container, {})[int(last)] = name
    found: dict[str, str] = {}
    for name, module in named:
        numbers = _expert_numbers(module)
        inside = [each for each in lists if numbers and (each == name or each.startswith(f"{name}." if name else ""))]
        fitting = [each for each in inside if sorted(lists[each]) == list(range(len(numbers)))]
        outer = [each for each in fitting if not any(each.startswith(f"{other}.") for other in fitting)]
        if len(outer) == 1:
            for own, expert in lists[outer[0]].items():
                found.setdefault(expert, f"{outer[0]}.{numbers[own]}")
    return found


def _expert_numbers(module: Any) -> list[int]:
    numbers = getattr(module, "local_expert_indices", None)
    if not isinstance(numbers, (list, tuple, range)) or not all(type(each) is int for each in numbers):
        return []
    return list(numbers) if len(set(numbers)) == len(numbers) and min(numbers, default=-1) >= 0 else []


def _number_of(layer: Any) -> int | None:
    children = list(getattr(layer, "_modules", {}).values())
    for attribute, first in _NUMBERS:
        for item in (layer, *children):
            number = getattr(item, attribute, None) if item is not None else None
            if type(number) is int and number >= first:
                return number - first
    return None

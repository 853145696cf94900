"""Whether a model is as it was in the step before: its parameters, hooks, children and plain attributes.

All of that is checked in every recorded step, and has hardly ever changed. `native/unchanged.h` does the same in C.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, cast

from tensortap.capture import native_classes
from tensortap.frameworks.base import Framework

__all__ = ["WatchedItems", "changed_items", "identify_hooks", "identify_parameters", "identify_values"]


class WatchedItems(NamedTuple):
    """Some values of a dictionary, as they were."""

    owner: Any
    """The object whose `__dict__` it is; None if it is another dictionary."""
    of: Mapping[str, Any]
    size: int
    """Number of all values; -1 if new ones do not matter."""
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def unchanged(self) -> bool:
        if self.owner is not None and vars(self.owner) is not self.of:
            return False
        if self.size not in (-1, len(self.of)):
            return False
        return all(self.of.get(name, self) is value for name, value in zip(self.names, self.values, strict=True))


def changed_items(entries: list[WatchedItems]) -> list[int]:
    """Return the positions of the entries with a value that was replaced."""
    if (native := native_classes.load()) is not None:
        return cast("list[int]", native.changed_items(entries))
    return [place for place, each in enumerate(entries) if not each.unchanged]


def identify_values(
    owners: list[Any], attribute: str, hooks: str | None = None, tensors: bool = False
) -> Hashable | None:
    """Return an object that is equal as long as the owners have the same objects in a dictionary of this name.

    The objects are not held. With `tensors`, the result also depends on whether each value requires a gradient. With
    `hooks`, the name of an attribute of the values, it also depends on the only hook in that attribute. Return None if
    a value has several hooks there, or an empty dictionary.
    """
    if (native := native_classes.load()) is not None:
        return cast("bytes | None", native.identify_values(owners, attribute, hooks, tensors))
    numbers: list[int] = []
    for owner in owners:
        values: Mapping[str, Any] = getattr(owner, attribute)
        numbers.append(len(values))
        for value in values.values():
            numbers.append(id(value))
            if hooks is not None and value is not None:
                placed = getattr(value, hooks)
                numbers.append(id(placed))
                if placed is not None and len(placed) != 1:
                    return None
                numbers += placed or ()
            if tensors and value is not None:
                numbers.append(value.requires_grad)
    return tuple(numbers)


def identify_parameters(framework: Framework, modules: list[Any]) -> Hashable:
    """Return an object that is equal as long as the modules have the same parameters, and the same ones are trained."""
    if framework.parameters_attribute is None:
        tensors = [tensor for _, _, tensor in framework.parameters_of(modules)]
        return *map(id, tensors), *framework.require_gradients(tensors)
    return identify_values(modules, framework.parameters_attribute, tensors=True)


def identify_hooks(framework: Framework, modules: list[Any]) -> Hashable | None:
    """Return an object that is equal as long as the modules have the same parameters, each with the same only hook.

    Return None if this cannot be determined.
    """
    if framework.parameters_attribute is None or framework.hooks_attribute is None:
        return None
    return identify_values(modules, framework.parameters_attribute, framework.hooks_attribute, tensors=True)

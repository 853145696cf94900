"""Names of modules in the whole model, where a process has only a stage or some of the experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensortap.capture.placement.layout import Layout
from tensortap.core.placement import Mesh
from tensortap.errors import UsageError
from tensortap.frameworks.placing import ModelPlacer

__all__ = ["GlobalNames"]


_EXPERTS = "ep"
"""The mesh axis along which processes hold other experts."""


class GlobalNames:
    """Finds the global names: by the user's rules, else by numbers that layers know of themselves."""

    def __init__(self, model: ModelPlacer | None, layout: Layout, mesh: Mesh | None) -> None:
        self._model = model
        self._layout = layout
        self._numbers = dict(zip(mesh.names, mesh.coordinates, strict=True)) if mesh is not None else {}
        if model is not None and model.stage is not None:
            self._numbers.setdefault("pp", model.stage.index)
            self._numbers["stage"] = model.stage.index
        elif (pipeline := self._numbers.get("pp")) is not None:
            self._numbers.setdefault("stage", pipeline)
        self.renames: dict[str, str] = {}
        """Global names by own names, where they differ."""
        self.axes: dict[str, Sequence[str]] = {}
        """By global name: the axes along which other processes have other modules in its place."""

    def __call__(self, modules: Sequence[tuple[str, Any]]) -> Mapping[str, str]:
        """Return the global name of each module by its own name."""
        given = self._layout.rename([name for name, _ in modules], self._numbers)
        layers = {} if self._model is None else self._model.global_names(modules)
        experts = {} if self._model is None else self._model.expert_names(modules)
        known = {**layers, **{own: _renamed_around(new, layers) for own, new in experts.items()}}
        found = {}
        for name, _ in modules:
            if name in given:
                found[name], axes = given[name]
                if axes:
                    self.axes[found[name]] = sorted({"pp" if axis == "stage" else axis for axis in axes} | axes)
            else:
                found[name] = _renamed(name, known)
                if _EXPERTS in self._numbers and any(name == own or name.startswith(f"{own}.") for own in experts):
                    self.axes[found[name]] = [_EXPERTS]
        if len(set(found.values())) < len(found):
            both = next(new for new in found.values() if list(found.values()).count(new) > 1)
            old = [name for name, new in found.items() if new == both]
            raise UsageError(f"{self._layout.where}: [names] gives {' and '.join(old)} the same name, {both}")
        self.renames = {own: new for own, new in found.items() if own != new}
        return found


def _renamed_around(name: str, known: Mapping[str, str]) -> str:
    """Return the global name of an expert with the list that it is in renamed, as the layers of a stage are."""
    container, _, number = name.rpartition(".")
    return f"{_renamed(container, known)}.{number}"


def _renamed(name: str, known: Mapping[str, str]) -> str:
    """Return the name with its longest known beginning replaced."""
    head, tail = name, ""
    while head:
        if head in known:
            return known[head] + tail
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return name

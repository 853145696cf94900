"""The facts that one process of several knows about its part of a model: mesh, global names, placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensortap.capture.messages import say
from tensortap.capture.modules.tree import Tree
from tensortap.capture.placement.global_names import GlobalNames
from tensortap.capture.placement.layout import Layout
from tensortap.capture.placement.placer import Placer
from tensortap.core.placement import Mesh
from tensortap.errors import UsageError
from tensortap.frameworks.base import Framework
from tensortap.frameworks.placing import MeshAxis, ModelPlacer, mesh_of

__all__ = ["Parallel"]


class Parallel:
    """Collects these facts when a tap is opened. In a run of one process without a layout, nothing is collected."""

    def __init__(self, framework: Framework, model: Any, layout: Layout) -> None:
        self.placer: Placer | None = None
        self.names: GlobalNames | None = None
        self.mesh: Mesh | None = None
        self.notices: list[str] = []
        self.report: Callable[[str], None] = self.notices.append
        """Called with each error of the layout that shows while tensors are recorded."""
        self._layout = layout
        world = framework.world()
        if world < 2 and not layout:
            return
        known: ModelPlacer | None = None
        if world > 1 and (place := getattr(framework, "model_placer", None)) is not None:
            known = place(model)
        self.mesh = _mesh(known, layout, framework.rank(), world)
        axes = self.mesh.names if self.mesh is not None else ()
        layout.parse((*axes, *(("micro",) if layout.uses_micro else ())))
        self.placer = Placer(known, layout, self.mesh, self._complain)
        self.names = GlobalNames(known, layout, self.mesh)
        if self.mesh is None and world > 1:
            self.notices.append(
                f"how {world} processes share the model is not known, so the records of one rank cannot be joined with "
                "those of the others: tap the wrapped model (DDP, FSDP), or give layout= with [mesh]"
            )

    @property
    def renames(self) -> Mapping[str, str]:
        return {} if self.names is None else self.names.renames

    def check(self, framework: Framework, tree: Tree) -> None:
        """Check the rules for parameters against their shapes. Raise UsageError for the first that does not fit."""
        if self.placer is None or self.mesh is None:
            return
        if self.names is not None:
            self.placer.alone(self.names.axes)
        used = set()
        for site in tree.sites:
            for name, parameter in (*framework.parameters(site.owner), *framework.buffers(site.owner)):
                full = f"{site.name}.{name}" if site.name else name
                shape = tuple(framework.local_shape(parameter))
                rule = self._layout.rule_of(full, "param", name, len(shape))
                if rule is None:
                    continue
                used.add(rule.text)
                try:
                    rule.place(shape, self.mesh)
                except ValueError as error:
                    raise UsageError(f"{self._layout.where}: {full} = {rule.text!r}: {error}") from None
        for each in self._layout.rules:
            if not each.kind and not used.intersection(each.texts):
                self.notices.append(f"{self._layout.where}: {each.pattern!r} selects no parameter or buffer")

    def _complain(self, text: str) -> None:
        self.report(text)
        say(text)


def _mesh(known: ModelPlacer | None, layout: Layout, rank: int, world: int) -> Mesh | None:
    """Return the mesh: what the layout gives, and what the framework knows beyond that."""
    given = layout.mesh_at(rank, world)
    axes = []
    if given is not None:
        axes = [MeshAxis(*each) for each in zip(given.names, given.sizes, given.coordinates, strict=True)]
    names = {axis.name for axis in axes}
    if known is not None:
        axes += [axis for axis in known.axes if axis.name not in names and axis.size > 1 and given is None]
        if known.stage is not None and not names & {"pp", "stage"} and given is None:
            axes.insert(0, MeshAxis("pp", known.stage.count, known.stage.index))
    if layout.uses_micro:
        axes.append(MeshAxis("micro", layout.mesh["micro"], 0))
    return mesh_of(axes)

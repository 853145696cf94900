"""The contract of a framework that knows which part of a whole each process holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tensortap.core.placement import Mesh, Placement

__all__ = ["DATA_AXES", "PIPELINE_AXES", "SEQUENCE_AXES", "MeshAxis", "ModelPlacer", "StageInfo", "mesh_of"]

DATA_AXES = ("dp", "ddp", "fsdp", "data", "batch", "replicate", "dp_replicate", "dp_shard", "hsdp", "sharding")
"""Names of axes along which processes get other samples."""
SEQUENCE_AXES = ("cp", "context", "context_parallel", "sep", "ulysses", "ring")
"""Names of axes along which processes get other tokens of the same samples."""
PIPELINE_AXES = ("pp", "pipe", "pipeline", "stage")
"""Names of axes along which processes have other modules."""


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of the mesh, as this process sees it."""

    name: str
    size: int
    coordinate: int
    ranks: tuple[int, ...] = ()
    """The processes along it, with this one; empty if they are not known."""


@dataclass(frozen=True, slots=True)
class StageInfo:
    """The pipeline stage that a model is."""

    index: int
    count: int


class ModelPlacer(Protocol):
    """The placements that a framework knows of one model's tensors: the parts that this process holds."""

    @property
    def axes(self) -> Sequence[MeshAxis]:
        """All axes that are known, the outermost first."""

    @property
    def data_axes(self) -> Sequence[str]:
        """Names of the axes along which processes get other samples."""

    @property
    def stage(self) -> StageInfo | None:
        """The pipeline stage that the model is."""

    def global_names(self, modules: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
        """Return the names that modules have in the whole model, by their own names, where they differ."""

    def expert_names(self, modules: Iterable[tuple[str, Any]]) -> Mapping[str, str]:
        """Return the names that experts have in the whole model, by their own names, if each process holds some of
        them.
        """

    def of_tensor(self, tensor: Any) -> Placement | None:
        """Return the placement that the tensor itself describes; None if it describes none."""

    def of_parameter(self, module: Any, name: str, tensor: Any, kind: str) -> Placement | None:
        """Return the placement of a parameter, buffer or its gradient; `kind` is param, param_grad, step_grad or
        buffer.
        """

    def of_activation(self, module: Any, kind: str, tensor: Any) -> Placement | None:
        """Return the placement of an input or output of a parallel layer, by the layer's own attributes."""

    def guess(self, tensor: Any) -> Placement | None:
        """Return the likely placement of a plain tensor between layers, without the batch; None if none is likely."""


def mesh_of(axes: Sequence[MeshAxis]) -> Mesh | None:
    """Return the axes as a mesh; None without any."""
    if not axes:
        return None
    return Mesh(
        tuple(axis.name for axis in axes), tuple(axis.size for axis in axes), tuple(axis.coordinate for axis in axes)
    )

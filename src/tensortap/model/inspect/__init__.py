"""Inspection: whether the framework trains, saves and moves each tensor of a model, and likely mistakes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks import network_of
from tensortap.frameworks.ownership import Ownership, ownership_of
from tensortap.model.inspect.gradient_watch import GradientWatch
from tensortap.model.inspect.inspection_warnings import InspectionWarning, find_warnings
from tensortap.model.inspect.tensors import InspectedModel, InspectedModule, InspectedTensor, collect_tensors
from tensortap.model.optimizer_list import optimizer_list
from tensortap.model.page_width import page_width

__all__ = ["Inspection", "inspect"]


def inspect(model: Any, optimizer: Any = None) -> Inspection:
    """Inspect every tensor of a torch or paddle model once, without changing anything.

    Several optimizers are a list or a dict. Their groups are numbered from the first to the last.

    >>> inspection = tensortap.inspect(model, optimizer)
    >>> print(inspection)               # a tree, the totals, and likely mistakes
    >>> [warning.code for warning in inspection.warnings]
    ['plain-attribute']
    """
    model = network_of(model)
    ownership = ownership_of(model)
    optimizers = optimizer_list(optimizer)
    return Inspection(ownership, model, optimizers, collect_tensors(ownership, model, optimizers))


class Inspection:
    """The tensors of a model at the time of the inspection."""

    def __init__(self, ownership: Ownership, model: Any, optimizers: list[Any], found: InspectedModel) -> None:
        self._ownership, self._model, self._optimizers, self._found = ownership, model, optimizers, found
        self.modules: list[InspectedModule] = found.modules
        """Every module with its direct tensors, in definition order."""
        self.warnings: list[InspectionWarning] = find_warnings(found, ownership, bool(optimizers))
        """Likely mistakes."""

    @property
    def tensors(self) -> list[InspectedTensor]:
        """Every tensor once, in definition order."""
        return self._found.tensors

    def totals(self) -> dict[str, Any]:
        """Return tensors, elements and bytes of each kind, and bytes of each dtype.

        `trained` and `statistics` are parts of `parameters`.
        """
        kinds: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "elements": 0, "nbytes": 0})
        dtypes: dict[str, int] = defaultdict(int)
        for tensor in self.tensors:
            if not tensor.registered and tensor.shared_with:
                continue  # its memory counts elsewhere
            names = [_total_name(tensor)]
            if tensor.statistics:
                names.append("statistics")
            elif tensor.kind == "parameter" and tensor.requires_grad and (tensor.groups or not self._optimizers):
                names.append("trained")
            for name in names:
                kinds[name]["tensors"] += 1
                kinds[name]["elements"] += tensor.elements
                kinds[name]["nbytes"] += tensor.nbytes
            dtypes[tensor.dtype] += tensor.nbytes
        return {**kinds, "nbytes_by_dtype": dict(dtypes)}

    def as_dict(self) -> dict[str, Any]:
        """Return the whole inspection, ready for json.dumps."""
        modules = [
            {
                "name": module.name,
                "class": module.cls,
                "also": module.also,
                "ties": [list(tie) for tie in module.ties],
                "hidden_in": module.hidden_in,
                "tensors": [self._tensor_as_dict(tensor) for tensor in module.tensors],
            }
            for module in self.modules
        ]
        return {
            "model": type(self._model).__name__,
            "framework": self._ownership.framework.name,
            "optimizer": ", ".join(type(each).__name__ for each in self._optimizers) or None,
            "groups": sum(len(self._ownership.groups(each)) for each in self._optimizers),
            "clearing": self._ownership.clearing,
            "clearing_choices": self._ownership.clearing_choices,
            "modules": modules,
            "totals": self.totals(),
            "warnings": [{"code": w.code, "text": w.text, "names": list(w.names)} for w in self.warnings],
        }

    def watch(self) -> GradientWatch:
        """Watch when gradients arrive, are used and are cleared while the `with` block trains."""
        if len(self._optimizers) > 1:
            raise UsageError(
                f"watch() follows one optimizer, and there are {len(self._optimizers)}: use "
                "tensortap.inspect(model, optimizer).watch() for each of them"
            )
        return GradientWatch(self._ownership, self._model, next(iter(self._optimizers), None), self._found.objects)

    def __str__(self) -> str:
        from tensortap.report.terminal.inspection import inspection_page  # loads rich; importing tensortap must not

        lines = inspection_page(self.as_dict(), page_width())
        return "\n".join(line.plain for line in lines)

    def __repr__(self) -> str:
        return (
            f"<Inspection of {type(self._model).__name__}: {len(self.tensors)} tensors, {len(self.warnings)} warnings>"
        )

    def _tensor_as_dict(self, tensor: InspectedTensor) -> dict[str, Any]:
        left = self._ownership.cleared if tensor.gradient != "none" else "none"
        by_model = tensor.kind == "parameter"
        return {
            **asdict(tensor),
            "shape": None if tensor.shape is None else list(tensor.shape),
            "elements": tensor.elements,
            "groups": list(tensor.groups),
            "saved_as": list(tensor.saved_as),
            "shared_with": list(tensor.shared_with),
            "after_clearing": {
                "model": left if by_model else tensor.gradient,
                "optimizer": left if tensor.groups else tensor.gradient,
            },
        }


def _total_name(tensor: InspectedTensor) -> str:
    if tensor.kind == "attribute":
        return "attributes"
    return "parameters" if tensor.kind == "parameter" else "buffers"

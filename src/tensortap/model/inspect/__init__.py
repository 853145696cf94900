"""What the framework will do with each tensor of a model: train it, save it, move it, or forget it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import Any

from tensortap.frameworks import network_of
from tensortap.frameworks.ownership import Ownership, ownership_of
from tensortap.model.inspect.concerns import Concern, concerns
from tensortap.model.inspect.live_watch import Live
from tensortap.model.inspect.tensor_facts import Gathered, ModuleFacts, TensorFacts, gather
from tensortap.model.page_width import page_width

__all__ = ["Inspection", "inspect"]


def inspect(model: Any, optimizer: Any = None) -> Inspection:
    """Look at every tensor of a torch or paddle model, once, and change nothing.

    >>> seen = tensortap.inspect(model, optimizer)
    >>> print(seen)                     # a tree, the totals, and what is usually a mistake
    >>> [w.code for w in seen.warnings]
    ['plain-attribute']
    """
    model = network_of(model)
    ownership = ownership_of(model)
    return Inspection(ownership, model, optimizer, gather(ownership, model, optimizer))


class Inspection:
    """The tensors of a model as they were when it was inspected."""

    def __init__(self, ownership: Ownership, model: Any, optimizer: Any, found: Gathered) -> None:
        self._own, self._model, self._optimizer, self._found = ownership, model, optimizer, found
        self.modules: list[ModuleFacts] = found.modules
        """Every module with its own tensors, in definition order."""
        self.warnings: list[Concern] = concerns(found, ownership, optimizer is not None)
        """What is usually a mistake."""

    @property
    def tensors(self) -> list[TensorFacts]:
        """Every tensor once, in definition order."""
        return [entry for module in self.modules for entry in module.tensors]

    def totals(self) -> dict[str, Any]:
        """Tensors, elements and bytes of each kind, and bytes of each dtype.

        `trained` and `statistics` are parts of `parameters`."""
        kinds: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "elements": 0, "nbytes": 0})
        dtypes: dict[str, int] = defaultdict(int)
        for entry in self.tensors:
            if not entry.registered and entry.shared_with:
                continue  # no memory of its own
            names = [_total(entry)]
            if entry.statistics:
                names.append("statistics")
            elif entry.kind == "parameter" and entry.requires_grad and (entry.groups or self._optimizer is None):
                names.append("trained")
            for name in names:
                kinds[name]["tensors"] += 1
                kinds[name]["elements"] += entry.elements
                kinds[name]["nbytes"] += entry.nbytes
            dtypes[entry.dtype] += entry.nbytes
        return {**kinds, "nbytes_by_dtype": dict(dtypes)}

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for json.dumps."""
        modules = [
            {
                "name": module.name,
                "class": module.cls,
                "also": module.also,
                "ties": [list(tie) for tie in module.ties],
                "hidden_in": module.hidden_in,
                "tensors": [self._entry(entry) for entry in module.tensors],
            }
            for module in self.modules
        ]
        return {
            "model": type(self._model).__name__,
            "framework": self._own.framework.name,
            "optimizer": None if self._optimizer is None else type(self._optimizer).__name__,
            "groups": 0 if self._optimizer is None else len(self._own.groups(self._optimizer)),
            "clearing": self._own.clearing,
            "modules": modules,
            "totals": self.totals(),
            "warnings": [{"code": w.code, "text": w.text, "names": list(w.names)} for w in self.warnings],
        }

    def watch(self) -> Live:
        """Watch gradients come, be cleared and be used while the `with` block trains."""
        return Live(self._own, self._model, self._optimizer, self._found.objects)

    def __str__(self) -> str:
        from tensortap.report.terminal.inspection import inspection_page  # loads rich; importing tensortap must not

        lines = inspection_page(self.as_dict(), page_width())
        return "\n".join(line.plain for line in lines)

    def __repr__(self) -> str:
        return (
            f"<Inspection of {type(self._model).__name__}: {len(self.tensors)} tensors, {len(self.warnings)} warnings>"
        )

    def _entry(self, entry: TensorFacts) -> dict[str, Any]:
        left = self._own.cleared if entry.gradient != "none" else "none"
        by_model = entry.kind == "parameter"
        return {
            **asdict(entry),
            "shape": None if entry.shape is None else list(entry.shape),
            "elements": entry.elements,
            "groups": list(entry.groups),
            "saved_as": list(entry.saved_as),
            "shared_with": list(entry.shared_with),
            "after_clearing": {
                "model": left if by_model else entry.gradient,
                "optimizer": left if entry.groups else entry.gradient,
            },
        }


def _total(entry: TensorFacts) -> str:
    if entry.kind == "attribute":
        return "attributes"
    return "parameters" if entry.kind == "parameter" else "buffers"

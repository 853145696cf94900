"""Notes on tensors that an optimizer updates instead of the model's: replaced ones, and copies (master weights)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from tensortap.core.records import Summary
from tensortap.frameworks.base import Framework
from tensortap.frameworks.loading import held_by
from tensortap.kernels import summarize
from tensortap.model.audit.undone_loads import same_values

__all__ = ["note_copied_values", "note_foreign_tensors", "note_stale_copies"]


def note_foreign_tensors(framework: Framework, optimizer: Any, model_ids: Collection[int], stepped: bool) -> str:
    """Return a note on tensors of the optimizer that the model does not have; empty if there are none.

    `stepped` says whether steps have changed the model. An optimizer that holds none of the model's tensors and still
    changes the model writes its copies back, so there is nothing to note.
    """
    held = {id(tensor) for tensor in held_by(framework, optimizer)}
    foreign = len(held - set(model_ids))
    if not foreign or (stepped and foreign == len(held)):
        return ""
    return (
        f"{foreign} of the {len(held)} tensors that the optimizer holds are not in the model (any more): its steps "
        "change those tensors, not the model. The optimizer keeps copies, or was created before "
        "load_state_dict(assign=True): create it after loading"
    )


def note_stale_copies(optimizer: Any) -> str:
    """Return a note on an optimizer whose step undid a load."""
    return (
        f"the optimizer ({type(optimizer).__name__}) keeps copies from before the load, such as float32 master "
        "weights, and steps from those: make it after loading, or load into its copies, too"
    )


def note_copied_values(
    framework: Framework, optimizer: Any, model_ids: Collection[int], values: Iterable[Summary | None]
) -> str:
    """Return a note if one of `values` equals a tensor that the optimizer holds and the model does not."""
    foreign = [
        tensor
        for tensor in held_by(framework, optimizer)
        if id(tensor) not in model_ids and not framework.unreadable(tensor)
    ]
    held = [summarize(framework.host(tensor)) for tensor in foreign]
    if not any(same_values(source, copy) for copy in values for source in held):
        return ""
    return (
        "the values that came back are copies of tensors that the optimizer holds instead of the model's: make these "
        "copies after loading"
    )

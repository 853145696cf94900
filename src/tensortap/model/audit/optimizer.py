"""Tensors that an optimizer steps on instead of the model's: replaced ones, and copies such as master weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from tensortap.core.records import Summary
from tensortap.frameworks.base import Framework
from tensortap.frameworks.loading import held_by
from tensortap.kernels import summarize
from tensortap.model.audit.undo import same_values

__all__ = ["copied_from_optimizer", "why_undone", "without_model"]


def without_model(framework: Framework, optimizer: Any, own: Collection[int], moved: bool) -> str:
    """A note on tensors of the optimizer that are not among `own`, the ids of the model's; empty if there are none.

    An optimizer that has none of the model's tensors and has `moved` the model writes its copies back itself.
    """
    held = {id(tensor) for tensor in held_by(framework, optimizer)}
    lost = len(held - set(own))
    if not lost or (moved and lost == len(held)):
        return ""
    return (
        f"the optimizer holds {lost} of its {len(held)} tensors that are not in the model (any more): its steps change "
        "those, and not the model. It has copies of its own, or was made before load_state_dict(assign=True)"
    )


def why_undone(optimizer: Any) -> str:
    """A note on an optimizer whose step has undone a load."""
    return (
        f"the optimizer ({type(optimizer).__name__}) keeps copies from before the load, such as float32 master "
        "weights, and steps from those: make it after loading, or load into its copies, too"
    )


def copied_from_optimizer(
    framework: Framework, optimizer: Any, own: Collection[int], values: Iterable[Summary | None]
) -> str:
    """A note if one of `values` is a copy of a tensor that the optimizer holds and the model does not."""
    foreign = [
        tensor for tensor in held_by(framework, optimizer) if id(tensor) not in own and not framework.unreadable(tensor)
    ]
    held = [summarize(framework.host(tensor)) for tensor in foreign]
    if not any(same_values(source, copy) for copy in values for source in held):
        return ""
    return (
        "the values that came back are copies of tensors that the optimizer holds instead of the model's: make these "
        "copies after loading"
    )

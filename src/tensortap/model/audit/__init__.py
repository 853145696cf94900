"""Audit: record when a checkpoint replaces the initial values of a model, and what changes them afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.model.audit.watch import Audit

__all__ = ["audit"]


def audit(model: Any, optimizer: Any = None) -> Audit:
    """Record where the values of a model's parameters and buffers come from: loads, optimizer steps, other changes.

    Start the audit right after building the model. It leaves loading unchanged: same return values, same exceptions.
    `check()` compares every element at once; `close()`, or the end of the block, does so a last time. Several
    optimizers are a list or a dict.

    >>> with tensortap.audit(model, optimizer) as audit:
    ...     model.load_state_dict(checkpoint, strict=False)
    ...     train(model, optimizer)
    >>> print(audit)
    >>> print(audit.timeline("layers.0.weight"))
    """
    from tensortap.model.audit.watch import Audit  # imports kernels and rich, which importing tensortap must not

    return Audit(model, optimizer)

"""Audit: when does the checkpoint replace the random initial values, and what changes them afterwards?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.model.audit.watch import Audit

__all__ = ["audit"]


def audit(model: Any, optimizer: Any = None) -> Audit:
    """Watch where the values of a model's parameters and buffers come from: loads, optimizer steps, anything else.

    Start it right after the model was built. Loading behaves as it does without: the same return values, the same
    exceptions. `check()` looks at every element at once; `close()`, or the end of the block, does it a last time.

    >>> with tensortap.audit(model, optimizer) as audit:
    ...     model.load_state_dict(checkpoint, strict=False)
    ...     train(model, optimizer)
    >>> print(audit)
    >>> print(audit.timeline("layers.0.weight"))
    """
    from tensortap.model.audit.watch import Audit  # loads the kernels and the terminal: not before it is needed

    return Audit(model, optimizer)

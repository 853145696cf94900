"""Recognises forwards by which a pipeline stage learns shapes: they run on memory without values."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["infers_shapes"]

_STAGES = "torch.distributed.pipelining.stage"
_INFERENCES = ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")
"""Methods of a stage that run its module to learn shapes, in several versions of torch."""


def infers_shapes() -> bool:
    """Return whether a pipeline stage runs its module only to learn shapes."""
    if _STAGES not in sys.modules:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _INFERENCES and frame.f_globals.get("__name__") == _STAGES:
            return True
        frame = frame.f_back
    return False

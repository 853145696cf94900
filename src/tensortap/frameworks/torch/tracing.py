"""Determines whether a forward computes values, or only runs to be traced."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tensortap.frameworks.torch.shape_inference import infers_shapes

__all__ = ["tracing"]

_SHADOWS = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode")
"""Dispatch modes in which tensors have shapes, but no values of their own."""


def tracing() -> bool:
    """Return whether a trace runs, or tensors are fake."""
    if torch._C._get_tracing_state() is not None or infers_shapes():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(type(mode).__name__ in _SHADOWS for mode in _get_current_dispatch_mode_stack())

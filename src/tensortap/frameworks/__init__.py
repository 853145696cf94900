"""The only package that imports torch or paddle, and only when one of their models is in use.

A framework is one folder and one registration below. Other packages add theirs with `register`, or with an entry point
in the group `tensortap.frameworks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.errors import MissingDependency
from tensortap.frameworks.base import Framework, Identity, Remove, require
from tensortap.frameworks.framework_base import FrameworkBase
from tensortap.frameworks.registry import framework_of, network_of, register

if TYPE_CHECKING:
    from tensortap.kernels.pairs.device import PairDevice

__all__ = [
    "Framework",
    "FrameworkBase",
    "Identity",
    "Remove",
    "framework_of",
    "network_of",
    "pair_device",
    "register",
    "require",
]

register("torch", "tensortap.frameworks.torch.framework:Torch", models="a torch.nn.Module")
register("paddle", "tensortap.frameworks.paddle.framework:Paddle", models="a paddle.nn.Layer (or a paddle.Model)")


def pair_device(name: str) -> PairDevice:
    """Return the GPU with this name, as a device that measures pairs of tensors."""
    try:
        from tensortap.frameworks.torch.pairs import gpu_pairs
    except ImportError as error:
        raise MissingDependency(
            f"device={name!r} needs torch, which is not installed; leave the device out to compare on the CPU"
        ) from error
    return gpu_pairs(name)

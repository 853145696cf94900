"""The only room that imports torch or paddle, and only when a model of theirs is at hand."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tensortap.errors import MissingDependency, UsageError
from tensortap.frameworks.base import Framework

if TYPE_CHECKING:
    from tensortap.kernels.pairs.device import PairDevice

__all__ = ["Framework", "framework_of", "network_of", "pair_device"]


def framework_of(model: Any) -> Framework:
    """The framework that a model was built with. A framework that is not loaded cannot have built it.

    >>> framework_of(torch.nn.Linear(2, 2)).name
    'torch'
    """
    if (torch := sys.modules.get("torch")) is not None and isinstance(model, torch.nn.Module):
        from tensortap.frameworks.torch.framework import Torch

        return Torch()
    if (paddle := sys.modules.get("paddle")) is not None and isinstance(model, paddle.nn.Layer):
        from tensortap.frameworks.paddle.framework import Paddle

        return Paddle()
    raise UsageError(
        f"a {type(model).__module__}.{type(model).__qualname__} is no model: "
        "give a torch.nn.Module or a paddle.nn.Layer (or a paddle.Model; not the model's class, optimizer or trainer)"
    )


def network_of(model: Any) -> Any:
    """The module to tap: the network of a `paddle.Model`, and every other model itself."""
    if (paddle := sys.modules.get("paddle")) is not None and isinstance(model, paddle.Model):
        return model.network
    return model


def pair_device(name: str) -> PairDevice:
    """The GPU of that name, to measure pairs of tensors on."""
    try:
        from tensortap.frameworks.torch.pairs import gpu_pairs
    except ImportError as error:
        raise MissingDependency(
            f"device={name!r} needs torch, which is not installed; leave the device out to compare on the CPU"
        ) from error
    return gpu_pairs(name)

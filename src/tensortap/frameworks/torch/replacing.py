"""Substitution of torch tensors, and saved state of torch models, for checks and noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.hooks import unserializable_hook

from tensortap.core import dtypes
from tensortap.frameworks.base import Remove
from tensortap.frameworks.capabilities import GradientReplacer
from tensortap.frameworks.torch.tensors import NAMES, from_numpy, is_distributed

__all__ = ["TensorSubstitution"]


class TensorSubstitution:
    """The protocols `Substitution`, `Reruns` and `ValueWriting` of `frameworks.capabilities`."""

    def substitute(
        self, tensor: torch.Tensor, values: npt.NDArray[np.generic], replacer: GradientReplacer
    ) -> torch.Tensor | None:
        if is_distributed(tensor) or tensor.layout != torch.strided:
            return None

        def fresh() -> torch.Tensor:
            fitting = dtypes.with_range_ends_of(NAMES.get(tensor.dtype, ""), values)
            return torch.empty_like(tensor, requires_grad=False).copy_(from_numpy(fitting))

        if torch.is_grad_enabled() and tensor.requires_grad:
            return _Substituted.apply(tensor, fresh, replacer)
        with torch.no_grad():
            return fresh()

    def replace_gradient(self, tensor: torch.Tensor, replacer: GradientReplacer) -> Remove | None:
        if not tensor.requires_grad:
            return None

        @unserializable_hook
        def hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:  # an output that the loss does not use
                return None
            values = replacer(gradient)
            return None if values is None else torch.empty_like(gradient).copy_(from_numpy(values))

        return tensor.register_hook(hook).remove

    def is_differentiable(self, gradient: torch.Tensor) -> bool:
        return gradient.requires_grad

    def overwrite(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        tensor.copy_(values)

    def save_state(self, model: torch.nn.Module) -> Callable[[], None]:
        saved = [
            (holder, name, tensor, tensor.detach().clone(), tensor.grad)
            for module in model.modules()
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None and not isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
        ]
        gradients = [None if gradient is None else gradient.detach().clone() for *_, gradient in saved]
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        random, on_devices = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]

        def restore() -> None:
            with torch.no_grad():
                for (holder, name, tensor, values, gradient), copy in zip(saved, gradients, strict=True):
                    holder[name] = tensor
                    tensor.data.copy_(values)
                    tensor.grad = gradient
                    if gradient is not None:
                        gradient.data.copy_(copy)
            torch.set_rng_state(random)
            for device, state in zip(devices, on_devices, strict=True):
                torch.cuda.set_rng_state(state, device)

        return restore

    def run_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        random = torch.Generator().manual_seed(0)
        gradients = [
            torch.randn(tensor.shape, generator=random).to(tensor) if tensor.ndim else torch.ones_like(tensor)
            for tensor in tensors
        ]
        if tensors:
            torch.autograd.backward(list(tensors), gradients)

    def fill(self, tensor: torch.Tensor, values: npt.NDArray[np.generic], recast: bool = False) -> None:
        if recast:
            tensor.data = from_numpy(values).to(tensor.device)
            return
        with torch.no_grad():
            tensor.copy_(from_numpy(values))


class _Substituted(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped to us
    """Takes a tensor's position in the graph with values that were not computed there."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, fresh: Callable[[], torch.Tensor], replacer: GradientReplacer
    ) -> torch.Tensor:
        ctx.replacer = replacer
        return fresh()  # neither an input nor a view, so later code may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        values = ctx.replacer(gradient)
        if values is not None:
            gradient = torch.empty_like(gradient).copy_(from_numpy(values))
        return gradient, None, None

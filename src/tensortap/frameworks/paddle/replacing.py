"""Substitution of paddle tensors, and saved state of paddle models, for checks and noise."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from tensortap.core import dtypes
from tensortap.frameworks.base import Remove
from tensortap.frameworks.capabilities import GradientReplacer
from tensortap.frameworks.paddle.static import uncompiled

__all__ = ["PaddleSubstitution", "tensor_like"]


class PaddleSubstitution:
    """The protocols `Substitution`, `Reruns` and `ValueWriting` of `frameworks.capabilities`."""

    def substitute(self, tensor: Any, values: npt.NDArray[np.generic], replacer: GradientReplacer) -> Any | None:
        if tensor.is_dist():
            return None

        def fresh() -> Any:
            name = str(tensor.dtype).removeprefix("paddle.")
            return tensor_like(dtypes.with_range_ends_of(name, values), tensor)

        if paddle.is_grad_enabled() and not tensor.stop_gradient:
            return _PaddleSubstitute.apply(tensor, fresh, replacer)
        with paddle.no_grad():
            return fresh()

    def replace_gradient(self, tensor: Any, replacer: GradientReplacer) -> Remove | None:
        if tensor.stop_gradient or tensor.is_dist():
            return None

        def hook(gradient: Any) -> Any:
            if gradient is None:  # an output that the loss does not use
                return None
            values = uncompiled(replacer, gradient)
            return None if values is None else tensor_like(values, gradient)

        number, reference = tensor.register_hook(hook)._hook_id, weakref.ref(tensor)

        def remove() -> None:
            if (alive := reference()) is not None:
                alive._remove_grad_hook(number)

        return remove

    def is_differentiable(self, gradient: Any) -> bool:
        return False  # paddle does not show this to a hook

    def overwrite(self, tensor: Any, values: Any) -> None:
        paddle.assign(values, tensor)

    def save_state(self, model: Any) -> Callable[[], None]:
        saved = [
            (holder, name, tensor, tensor.detach().clone(), tensor.grad)
            for module in model.sublayers(include_self=True)
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None and tensor._is_initialized()
        ]
        gradients = [None if gradient is None else gradient.clone() for *_, gradient in saved]
        random = paddle.get_rng_state()

        def restore() -> None:
            with paddle.no_grad():
                for (holder, name, tensor, values, _), gradient in zip(saved, gradients, strict=True):
                    holder[name] = tensor
                    tensor.set_value(values)
                    if gradient is None:
                        tensor.clear_gradient(False)  # paddle before 3.3 rejects `grad = None`
                    else:
                        tensor.grad = gradient.clone()
            paddle.set_rng_state(random)

        return restore

    def run_backward(self, tensors: Sequence[Any]) -> None:
        random = np.random.default_rng(0)
        gradients = [
            tensor_like(random.standard_normal(tuple(tensor.shape)) if tensor.ndim else np.ones(()), tensor)
            for tensor in tensors
        ]
        if tensors:
            paddle.autograd.backward(list(tensors), gradients)

    def fill(self, tensor: Any, values: npt.NDArray[np.generic], recast: bool = False) -> None:
        with paddle.no_grad():
            tensor.set_value(tensor_like(values, tensor))


class _PaddleSubstitute(paddle.autograd.PyLayer):  # type: ignore[misc]  # paddle is untyped to us
    """Takes a tensor's position in the graph with values that were not computed there."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, fresh: Callable[[], Any], replacer: GradientReplacer) -> Any:
        ctx.replacer = replacer
        ctx.set_materialize_grads(False)  # zeros would reach parameters that get no gradient without the check
        return fresh()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        values = None if gradient is None else uncompiled(ctx.replacer, gradient)
        return gradient if values is None else tensor_like(values, gradient)


def tensor_like(values: npt.NDArray[np.generic], like: Any) -> Any:
    """Return the values in new memory, with the dtype and device of another tensor."""
    if dtypes.name_of(values.dtype) in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        values = values.astype(np.float32)  # float32 represents every number of a shorter dtype
    values = np.require(values, requirements="C")  # unlike ascontiguousarray, it gives a scalar no axis
    return paddle.to_tensor(values, place=like.place).astype(like.dtype)

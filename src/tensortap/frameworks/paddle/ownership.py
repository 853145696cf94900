"""Owners of paddle tensors: layers, optimizers and state_dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import paddle

from tensortap.frameworks.base import Framework, Remove
from tensortap.frameworks.hooks import Detour
from tensortap.frameworks.ownership import Ownership
from tensortap.frameworks.paddle.optimizers import parameter_groups, stepper

__all__ = ["PaddleOwnership"]


class PaddleOwnership(Ownership):
    """Owners of paddle tensors."""

    clearing, cleared = "clear_grad()", "zero"
    clearing_choices = "clear_grad() leaves zeros, clear_grad(set_to_zero=False) leaves no gradient"
    clears_on_model = ("clear_gradients",)
    clears_on_optimizer = ("clear_grad", "zero_grad")
    module_list, module_dict = "LayerList", "LayerDict"
    parameter_containers = "ParameterList"
    freezing = "stop_gradient = True"
    module_class = paddle.nn.Layer

    def __init__(self, framework: Framework) -> None:
        super().__init__(framework)
        self._bookkeeping = frozenset(vars(paddle.nn.Layer()))

    @property
    def bookkeeping(self) -> frozenset[str]:
        return self._bookkeeping

    def groups(self, optimizer: Any) -> list[list[Any]]:
        groups = parameter_groups(optimizer)
        if groups and isinstance(groups[0], Mapping):
            return [list(group["params"]) for group in groups]
        return [list(groups)]

    def described(self, tensor: Any) -> tuple[str, tuple[int, ...] | None, int, str]:
        dtype = str(tensor.dtype).removeprefix("paddle.")
        place = str(tensor.place).removeprefix("Place(").removesuffix(")")
        return dtype, tuple(tensor.shape), int(tensor.element_size()), place

    def initialised(self, tensor: Any) -> bool:
        return bool(tensor._is_initialized())

    def is_parameter(self, tensor: Any) -> bool:
        return isinstance(tensor, paddle.base.framework.EagerParamBase)

    def storage(self, tensor: Any) -> int | None:
        return (int(tensor.data_ptr()) or None) if tensor._is_initialized() else None

    def gradient(self, tensor: Any) -> str:
        gradient = tensor.grad
        if gradient is None or not gradient._is_initialized():
            return "none"
        if gradient.is_selected_rows():
            return "set"
        return "set" if bool((gradient != 0).any()) else "zero"

    def around_step(self, optimizer: Any, before: Callable[[bool], None], after: Callable[[], None]) -> Remove:
        def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before(any(callable(value) for value in (*args, *kwargs.values())))
            result = inner(*args, **kwargs)
            after()
            return result

        return Detour(stepper(optimizer), "step", around).remove

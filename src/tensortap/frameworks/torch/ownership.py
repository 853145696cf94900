"""Owners of torch tensors: modules, optimizers and state_dicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensortap.errors import UsageError
from tensortap.frameworks.base import Framework, Remove
from tensortap.frameworks.hooks import innermost_optimizer
from tensortap.frameworks.ownership import Ownership
from tensortap.frameworks.torch.steps import after_step, before_step

__all__ = ["TorchOwnership"]


class TorchOwnership(Ownership):
    """Owners of torch tensors."""

    clearing, cleared = "zero_grad()", "none"
    clearing_choices = "zero_grad() leaves no gradient, zero_grad(set_to_none=False) leaves zeros"
    clears_on_model = clears_on_optimizer = ("zero_grad",)
    module_list, module_dict = "ModuleList", "ModuleDict"
    parameter_containers = "ParameterList or ParameterDict"
    freezing = "requires_grad_(False)"
    module_class = torch.nn.Module

    def __init__(self, framework: Framework) -> None:
        super().__init__(framework)
        self._bookkeeping = frozenset(vars(torch.nn.Module()))

    @property
    def bookkeeping(self) -> frozenset[str]:
        return self._bookkeeping

    def saved(self, model: Any) -> dict[str, Any]:
        # Its state_dict gathers from every rank, and blocks for ever if only one rank inspects.
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise RuntimeError("FullyShardedDataParallel gathers it from all ranks")
        return super().saved(model)

    def groups(self, optimizer: Any) -> list[list[Any]]:
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, Sequence):
            raise UsageError(f"optimizer= takes a torch.optim.Optimizer, not a {type(optimizer).__qualname__}")
        return [list(group["params"]) for group in groups]

    def described(self, tensor: Any) -> tuple[str, tuple[int, ...] | None, int, str]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape) if self.initialised(tensor) else None
        return dtype, shape, int(tensor.dtype.itemsize), str(tensor.device)

    def initialised(self, tensor: Any) -> bool:
        return not isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)

    def is_parameter(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.nn.Parameter)

    def storage(self, tensor: Any) -> int | None:
        try:
            return int(tensor.untyped_storage().data_ptr()) or None
        except (RuntimeError, NotImplementedError, ValueError):  # lazy, sparse and meta tensors have no memory
            return None

    def gradient(self, tensor: Any) -> str:
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is None:
            return "none"
        if hasattr(gradient, "to_local"):
            gradient = gradient.to_local()
        if gradient.layout != torch.strided:
            gradient = gradient.coalesce().values()
        if gradient.device.type == "meta":
            return "set"
        return "set" if bool(torch.count_nonzero(gradient)) else "zero"

    def around_step(self, optimizer: Any, before: Callable[[bool], None], after: Callable[[], None]) -> Remove:
        def entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            before(any(callable(value) for value in (*args, *kwargs.values())))

        optimizer = innermost_optimizer(optimizer)
        first, last = before_step(optimizer, entered), after_step(optimizer, after)

        def remove() -> None:
            first()
            last()

        return remove

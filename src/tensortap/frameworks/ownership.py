"""Who owns a tensor: the module, the optimizer, the state_dict or nobody. The same questions for torch and paddle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks import framework_of
from tensortap.frameworks.base import Framework, Remove
from tensortap.frameworks.hooks import Detour, innermost_optimizer

__all__ = ["Ownership", "PaddleOwnership", "TorchOwnership", "ownership_of"]


class Ownership:
    """What both frameworks answer alike; the two below say where they differ."""

    clearing: str
    """How this framework's users clear gradients."""
    cleared: str
    """What that leaves where there was a gradient, unless told otherwise: none or zero."""
    on_model: tuple[str, ...]
    """Methods of a module that clear gradients."""
    on_optimizer: tuple[str, ...]
    module_class: type

    def __init__(self, framework: Framework) -> None:
        self.framework = framework

    def is_module(self, value: Any) -> bool:
        return isinstance(value, self.module_class)

    def attributes(self, module: Any) -> list[tuple[str, Any]]:
        """What stands in the module's `__dict__` beside the framework's own bookkeeping."""
        return [(name, value) for name, value in vars(module).items() if name not in self.bookkeeping]

    @property
    def bookkeeping(self) -> frozenset[str]:
        raise NotImplementedError

    def saved(self, model: Any) -> dict[str, Any]:
        """Every key of the state_dict with the very tensor behind it."""
        return {
            key: tensor
            for key, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(key, str) and self.framework.is_tensor(tensor)
        }

    def groups(self, optimizer: Any) -> list[list[Any]]:
        raise NotImplementedError

    def described(self, tensor: Any) -> tuple[str, tuple[int, ...] | None, int, str]:
        """dtype, shape (None: not known before the first forward), bytes of one element, device."""
        raise NotImplementedError

    def initialised(self, tensor: Any) -> bool:
        raise NotImplementedError

    def is_parameter(self, tensor: Any) -> bool:
        raise NotImplementedError

    def storage(self, tensor: Any) -> int | None:
        """Equal for tensors that look into the same memory; None where there is none."""
        raise NotImplementedError

    def gradient(self, tensor: Any) -> str:
        """none, zero or set."""
        raise NotImplementedError

    def around_step(self, optimizer: Any, before: Callable[[bool], None], after: Callable[[], None]) -> Remove:
        """`before` is told whether a closure will run backward inside the step."""
        raise NotImplementedError

    def on_clearing(self, owner: Any, methods: Sequence[str], cleared: Callable[[str], None]) -> Remove:
        """After each call of a method that clears gradients; neither framework has a hook for it."""

        def around(name: str) -> Callable[..., Any]:
            def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                result = inner(*args, **kwargs)
                cleared(name)
                return result

            return call

        detours = [Detour(owner, name, around(name)) for name in methods if hasattr(owner, name)]

        def remove() -> None:
            for detour in detours:
                detour.remove()

        return remove


class TorchOwnership(Ownership):
    clearing, cleared = "zero_grad()", "none"
    on_model = on_optimizer = ("zero_grad",)

    def __init__(self, framework: Framework) -> None:
        super().__init__(framework)
        import torch

        self._torch = torch
        self.module_class = torch.nn.Module
        self._bookkeeping = frozenset(vars(torch.nn.Module()))

    @property
    def bookkeeping(self) -> frozenset[str]:
        return self._bookkeeping

    def saved(self, model: Any) -> dict[str, Any]:
        # Its state_dict gathers from every rank, and would wait for ever if one rank alone inspects.
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
        return not isinstance(tensor, self._torch.nn.parameter.UninitializedTensorMixin)

    def is_parameter(self, tensor: Any) -> bool:
        return isinstance(tensor, self._torch.nn.Parameter)

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
        if gradient.layout != self._torch.strided:
            gradient = gradient.coalesce().values()
        if gradient.device.type == "meta":
            return "set"
        return "set" if bool(self._torch.count_nonzero(gradient)) else "zero"

    def around_step(self, optimizer: Any, before: Callable[[bool], None], after: Callable[[], None]) -> Remove:
        from tensortap.frameworks.torch.steps import after_step, before_step

        def entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            before(any(callable(value) for value in (*args, *kwargs.values())))

        optimizer = innermost_optimizer(optimizer)
        first, last = before_step(optimizer, entered), after_step(optimizer, after)

        def remove() -> None:
            first()
            last()

        return remove


class PaddleOwnership(Ownership):
    clearing, cleared = "clear_grad()", "zero"
    on_model = ("clear_gradients",)
    on_optimizer = ("clear_grad", "zero_grad")

    def __init__(self, framework: Framework) -> None:
        super().__init__(framework)
        import paddle

        self._paddle = paddle
        self.module_class = paddle.nn.Layer
        self._bookkeeping = frozenset(vars(paddle.nn.Layer()))

    @property
    def bookkeeping(self) -> frozenset[str]:
        return self._bookkeeping

    def groups(self, optimizer: Any) -> list[list[Any]]:
        from tensortap.frameworks.paddle.optimizers import parameter_groups

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
        return isinstance(tensor, self._paddle.base.framework.EagerParamBase)

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

        from tensortap.frameworks.paddle.optimizers import stepper

        return Detour(stepper(optimizer), "step", around).remove


def ownership_of(model: Any) -> Ownership:
    framework = framework_of(model)
    assert framework.name in sys.modules  # it built the model
    return TorchOwnership(framework) if framework.name == "torch" else PaddleOwnership(framework)

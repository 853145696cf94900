"""Runs torch modules in float64, whatever dtypes their code asks for."""
# mypy: allow-untyped-calls

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tensortap.frameworks.closures import rebind_functions
from tensortap.frameworks.torch.tensors import from_numpy, is_distributed

__all__ = ["TorchExactExecution"]

_LOW = frozenset(
    dtype
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    if (dtype := getattr(torch, name, None)) is not None
)
_FALLBACKS = (torch.float32, torch.bfloat16)
"""Dtypes of operations that have no float64 kernel, as grouped products and attention of other libraries."""
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_COMPUTING_HOOKS = ("torch.nn.utils.", "transformers.")
"""Packages of hooks that a forward needs: those of the older weight_norm compute weights, those of transformers collect
hidden states and router scores for a loss. Others only observe."""


class TorchExactExecution:
    """The protocol `ExactExecution` of `frameworks.capabilities`."""

    def exact_copy(self, module: torch.nn.Module) -> torch.nn.Module:
        if any(is_distributed(parameter) for parameter in module.parameters()):
            raise TypeError("its parameters are distributed over several ranks")
        twin = copy.deepcopy(module).double()
        rebind_functions(_copied(module, twin), twin.modules())
        for each in twin.modules():
            if getattr(each, "_compiled_call_impl", None) is not None:
                each._compiled_call_impl = None
            _drop_hooks(each)
        return twin

    def exact_value(self, value: Any) -> Any:
        def exact(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                wide = leaf.detach().to(torch.float64, copy=True) if leaf.is_floating_point() else leaf.detach().clone()
                return wide.requires_grad_(leaf.requires_grad)
            return copy.deepcopy(leaf)

        return tree_map(exact, value)

    @contextmanager
    def exactly(
        self, drew: Callable[[], None], autograd: bool = False, rounded: Callable[[str], None] | None = None
    ) -> Iterator[None]:
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        states = random.getstate(), np.random.get_state()
        with ExitStack() as stack:
            stack.callback(np.random.set_state, states[1])
            stack.callback(random.setstate, states[0])
            stack.enter_context(torch.random.fork_rng(devices))
            for device in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(device, enabled=False))
            if not autograd:
                stack.enter_context(torch.no_grad())
            stack.enter_context(_Float64(drew, rounded))
            yield

    def exact_backward(self, starts: Sequence[tuple[torch.Tensor, npt.NDArray[Any]]]) -> None:
        if starts:
            gradients = [from_numpy(values).to(tensor) for tensor, values in starts]
            torch.autograd.backward([tensor for tensor, _ in starts], gradients)


class _Float64(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped to us
    """Widens every operation: floating-point tensors, and dtypes among the arguments, become float64.

    A module that upcasts to float32, or rounds to bfloat16 on its way, then rounds nowhere. An operation that changes a
    tensor of a shorter dtype in place changes a copy, so that nothing outside is touched.
    """

    def __init__(self, drew: Callable[[], None], rounded: Callable[[str], None] | None) -> None:
        super().__init__()
        self._drew, self._rounded = drew, rounded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        wide_args, wide_kwargs = tree_map(_widened, args), tree_map(_widened, dict(kwargs or {}))
        may_draw = torch.Tag.nondeterministic_seeded in func.tags  # attention has the tag also without dropout
        before = _random_states() if may_draw else []
        made = self._call(func, wide_args, wide_kwargs)
        if may_draw and any(not torch.equal(*each) for each in zip(before, _random_states(), strict=True)):
            self._drew()
        if not any(isinstance(leaf, torch.Tensor) and leaf.dtype in _LOW for leaf in tree_leaves(made)):
            return made
        if any(argument.name == "dtype" for argument in func._schema.arguments):
            return func(*wide_args, **{**wide_kwargs, "dtype": torch.float64})  # the default dtype of a new tensor
        return tree_map(_widened, made)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation in float64. If it has no kernel for that, call it in a shorter dtype and report it to
        `rounded`.
        """
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if self._rounded is None or isinstance(error, torch.OutOfMemoryError):
                raise
            for dtype in _FALLBACKS:
                with suppress(RuntimeError):
                    made = func(
                        *tree_map(partial(_narrowed, dtype), args), **tree_map(partial(_narrowed, dtype), kwargs)
                    )
                    self._rounded(func.name())
                    return made
            raise


def _copied(module: torch.nn.Module, twin: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the modules, parameters and buffers of a module, each with its copy."""
    yield from zip(module.modules(), twin.modules(), strict=True)
    yield from zip(module.parameters(), twin.parameters(), strict=True)
    yield from zip(module.buffers(), twin.buffers(), strict=True)


def _random_states() -> list[torch.Tensor]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _widened(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(torch.float64) if leaf.dtype in _LOW else leaf
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf in _LOW else leaf


def _narrowed(dtype: torch.dtype, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.dtype == torch.float64 else leaf
    return dtype if leaf is torch.float64 else leaf


def _drop_hooks(module: torch.nn.Module) -> None:
    """Remove the hooks that a copy has inherited, except those that its forward needs."""
    for attribute in _HOOKS:
        hooks = getattr(module, attribute, None) or {}
        for number, hook in list(hooks.items()):
            origin = getattr(hook, "__module__", None) or type(hook).__module__
            if not str(origin).startswith(_COMPUTING_HOOKS):
                del hooks[number]

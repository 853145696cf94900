"""Runs paddle layers in float64, whatever dtypes their code asks for."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from tensortap.frameworks.closures import rebind_functions
from tensortap.frameworks.paddle.random_states import random_states
from tensortap.frameworks.paddle.replacing import tensor_like

__all__ = ["PaddleExactExecution"]

_FLOAT64 = paddle.float64
_LOW = frozenset(
    getattr(paddle, name)
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    if hasattr(paddle, name)
)
_LOW_NAMES = frozenset(str(dtype).removeprefix("paddle.") for dtype in _LOW)
_FALLBACKS = (paddle.float32, paddle.bfloat16)
"""Dtypes of operations that have no float64 kernel."""
_HOOKS = ("_forward_pre_hooks", "_forward_post_hooks")
_COMPUTING_HOOKS = "paddle.nn.utils."
"""Package of hooks that compute weights, as those of weight_norm do; others only observe."""
_DRAWING = ("dropout", "gaussian", "uniform", "rand", "bernoulli", "multinomial", "poisson", "exponential", "attn")
"""Parts of the names of operations that may draw random numbers."""


class PaddleExactExecution:
    """The protocol `ExactExecution` of `frameworks.capabilities`."""

    def exact_copy(self, module: Any) -> Any:
        if any(parameter.is_dist() for parameter in module.parameters()):
            raise TypeError("its parameters are distributed over several ranks")
        twin = copy.deepcopy(module)
        rebind_functions(_copied(module, twin), twin.sublayers(include_self=True))
        for each in twin.sublayers(include_self=True):
            _widen_state(each)
            for attribute in _HOOKS:
                hooks = getattr(each, attribute, None) or {}
                for number, hook in list(hooks.items()):
                    origin = getattr(hook, "__module__", None) or type(hook).__module__
                    if not str(origin).startswith(_COMPUTING_HOOKS):
                        del hooks[number]
        return twin

    def exact_value(self, value: Any) -> Any:
        if isinstance(value, paddle.Tensor):
            wide = value.detach().clone()
            wide = wide.astype(_FLOAT64) if wide.dtype in _LOW else wide
            wide.stop_gradient = value.stop_gradient
            return wide
        if type(value) in (tuple, list):
            return type(value)(map(self.exact_value, value))
        if type(value) is dict:
            return {name: self.exact_value(each) for name, each in value.items()}
        return copy.deepcopy(value)

    @contextmanager
    def exactly(
        self, drew: Callable[[], None], autograd: bool = False, rounded: Callable[[str], None] | None = None
    ) -> Iterator[None]:
        states = random.getstate(), np.random.get_state(), paddle.get_rng_state(), paddle.get_default_dtype()
        with ExitStack() as stack:
            stack.callback(random.setstate, states[0])
            stack.callback(np.random.set_state, states[1])
            stack.callback(paddle.set_rng_state, states[2])
            stack.callback(paddle.set_default_dtype, states[3])
            paddle.set_default_dtype("float64")
            stack.enter_context(paddle.amp.auto_cast(enable=False))
            if not autograd:
                stack.enter_context(paddle.no_grad())
            stack.enter_context(_widened_operations(drew, rounded))
            yield

    def exact_backward(self, starts: Sequence[tuple[Any, npt.NDArray[Any]]]) -> None:
        if starts:
            gradients = [tensor_like(values, tensor) for tensor, values in starts]
            paddle.autograd.backward([tensor for tensor, _ in starts], gradients)


@contextmanager
def _widened_operations(drew: Callable[[], None], rounded: Callable[[str], None] | None) -> Iterator[None]:
    """Widen every operation of the block: floating-point tensors, and dtypes among the arguments, become float64.

    All of paddle's Python code finds operations in one module. Arithmetic operators do not pass it: their operands have
    been made there, or are parameters and inputs, which are in float64 already.
    """
    operations = paddle._C_ops
    own = {name: each for name, each in vars(operations).items() if callable(each) and not name.startswith("_")}
    try:
        for name, each in own.items():
            setattr(operations, name, _widened_operation(name, each, drew, rounded))
        yield
    finally:
        for name, each in own.items():
            setattr(operations, name, each)


def _widened_operation(
    name: str, operation: Callable[..., Any], drew: Callable[[], None], rounded: Callable[[str], None] | None
) -> Callable[..., Any]:
    may_draw = any(word in name for word in _DRAWING)

    @wraps(operation)
    def widened(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _mapped(_wide, args), _mapped(_wide, kwargs)
        before = dict(random_states()) if may_draw else {}
        try:
            made = operation(*args, **kwargs)
        except (RuntimeError, ValueError):
            if rounded is None:
                raise
            made = _in_shorter_dtype(operation, args, kwargs)
            if made is None:
                raise
            rounded(name)
        if may_draw and dict(random_states()) != before:
            drew()
        return _mapped(_wide, made)

    return widened


def _in_shorter_dtype(operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation that has no float64 kernel; return None if it has no other, either."""
    for dtype in _FALLBACKS:
        narrow = partial(_narrowed, dtype)
        with suppress(RuntimeError, ValueError):
            return operation(*_mapped(narrow, args), **_mapped(narrow, kwargs))
    return None


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, paddle.Tensor):
        return leaf if leaf.dtype not in _LOW else _cast(leaf, _FLOAT64)
    if isinstance(leaf, str):
        return "float64" if leaf in _LOW_NAMES else leaf
    return _FLOAT64 if type(leaf) is paddle.dtype and leaf in _LOW else leaf


def _narrowed(dtype: Any, leaf: Any) -> Any:
    if isinstance(leaf, paddle.Tensor):
        return _cast(leaf, dtype) if leaf.dtype == _FLOAT64 else leaf
    return dtype if type(leaf) is paddle.dtype and leaf == _FLOAT64 else leaf


_cast = paddle._C_ops.cast
"""The operation itself, which no block replaces."""


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the leaves of the arguments or results of an operation."""
    if type(value) in (tuple, list):
        return type(value)(_mapped(function, each) for each in value)
    if isinstance(value, Mapping):
        return {name: _mapped(function, each) for name, each in value.items()}
    return function(value)


def _copied(module: Any, twin: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the layers, parameters and buffers of a layer, each with its copy."""
    yield from zip(module.sublayers(include_self=True), twin.sublayers(include_self=True), strict=True)
    yield from zip(module.parameters(), twin.parameters(), strict=True)
    yield from zip(module.buffers(), twin.buffers(), strict=True)


def _widen_state(layer: Any) -> None:
    """Convert a layer's own parameters and buffers to float64, in place: several layers may share one."""
    for holder in (layer._parameters, layer._buffers):
        for tensor in holder.values():
            if tensor is not None and tensor._is_initialized() and tensor.dtype in _LOW:
                with paddle.no_grad():
                    wide = _cast(tensor, _FLOAT64)
                tensor.value().get_tensor()._share_data_with(wide.value().get_tensor())
    if getattr(layer, "_dtype", None) in _LOW_NAMES | _LOW:
        layer._dtype = "float64"

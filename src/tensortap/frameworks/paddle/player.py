"""PaddlePaddle's implementation of `frameworks.player.Player`."""
# mypy: allow-untyped-calls

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from tensortap.core import dtypes
from tensortap.core.arguments import OpaqueValue
from tensortap.errors import UsageError
from tensortap.frameworks.paddle.dialect import PaddleDialect
from tensortap.frameworks.player import FLOATS, Dialect

__all__ = ["PaddlePlayer"]

_PLAIN = (bool, int, float, str, type(None), tuple, list)
_NAMES = ("training", "name", "_name", "_full_name", "_built")
_BITS = {"bfloat16": "int16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}


class PaddlePlayer:
    """Recorded values as paddle tensors."""

    dialect: Dialect = PaddleDialect()

    def tensor(self, values: npt.NDArray[np.generic], like: Any, dtype: str | None) -> Any:
        state = next(iter([*like.parameters(), *like.buffers()]), None)
        tensor = _tensor(values)
        if state is not None:
            tensor = tensor._copy_to(state.place, True)
        return tensor.astype(dtype) if dtype is not None and _is_float(tensor) else tensor

    def differentiable(self, tensor: Any) -> Any:
        if not _is_float(tensor):
            return tensor
        tensor.stop_gradient = False
        return tensor.clone()

    def moved(self, module: Any, dtype: str | None, device: str | None) -> Any:
        try:
            return module.to(device=device, dtype=dtype)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"the layer cannot be moved to {device or dtype}: {error}") from error

    def own_gradients(self, outputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        own = [gradient.astype(output.dtype) for output, gradient in zip(outputs, gradients, strict=True)]
        later = {
            place: [at for at, other in enumerate(outputs) if at != place and _gradient([other], output) is not None]
            for place, output in enumerate(outputs)
        }
        for place in sorted(later, key=lambda at: len(later[at])):  # those on which no other depends come first
            if others := later[place]:
                made, sent = [outputs[at] for at in others], [own[at] for at in others]
                own[place] = own[place] - _gradient(made, outputs[place], sent)
        return own

    def backward(self, outputs: Sequence[Any], gradients: Sequence[Any]) -> None:
        sent = [gradient.astype(output.dtype) for output, gradient in zip(outputs, gradients, strict=True)]
        paddle.autograd.backward(list(outputs), sent)

    def named(self, value: OpaqueValue) -> Any:
        if value.kind == "dtype" and isinstance(found := getattr(paddle, value.text, None), paddle.dtype):
            return found
        try:
            return paddle.device._convert_to_place(value.text)
        except ValueError as error:
            raise UsageError(f"paddle has no {value.kind} {value.text}") from error

    def plain_source(self, module: Any) -> str | None:
        """Build the expression from the signature of the layer's class, and return it if it builds the same layer."""
        kind = type(module)
        if not kind.__module__.startswith("paddle.nn.layer.") or list(module.children()) or "forward" in vars(module):
            return None
        source = f"paddle.nn.{kind.__name__}({', '.join(_arguments(module))})"
        try:
            built = eval(source, {"paddle": paddle})
        except Exception:
            return None
        same = [_settings(built) == _settings(module), _shapes(built) == _shapes(module)]
        return source if type(built) is kind and all(same) else None


def _arguments(layer: Any) -> Iterator[str]:
    """Yield the arguments of a paddle layer that it keeps as attributes, with or without a "_"."""
    for name, parameter in list(inspect.signature(type(layer).__init__).parameters.items())[1:]:
        value: Any
        default: Any
        if name.endswith("_attr"):
            own = getattr(layer, name.removesuffix("_attr"), True)
            default = None
            value = False if own is None else None
        elif name in ("in_features", "out_features") and isinstance(layer, paddle.nn.Linear):
            value, default = int(layer.weight.shape[name == "out_features"]), parameter.empty
        else:
            value, default = vars(layer).get(name, vars(layer).get(f"_{name}", parameter.default)), parameter.default
        if type(value) in _PLAIN and value != default:
            yield f"{name}={value!r}"


def _settings(layer: Any) -> dict[str, Any]:
    """Return the plain settings of a layer, without its name and mode."""
    return {
        name: value
        for name, value in vars(layer).items()
        if type(value) in _PLAIN and name not in _NAMES and not name.endswith("_attr")
    }


def _shapes(layer: Any) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]}


def _gradient(made: list[Any], output: Any, sent: list[Any] | None = None) -> Any:
    return paddle.grad(made, [output], sent, retain_graph=True, allow_unused=True)[0]


def _is_float(tensor: Any) -> bool:
    return str(tensor.dtype).removeprefix("paddle.") in FLOATS


def _tensor(values: npt.NDArray[np.generic]) -> Any:
    values = np.array(values, order="C")
    name = dtypes.name_of(values.dtype)
    if name in _BITS:
        return paddle.to_tensor(values.view(_BITS[name])).view(name)
    return paddle.to_tensor(values)

"""PyTorch's implementation of `frameworks.player.Player`."""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensortap.core.arguments import OpaqueValue
from tensortap.errors import UsageError
from tensortap.frameworks.player import Dialect
from tensortap.frameworks.torch.dialect import TorchDialect
from tensortap.frameworks.torch.tensors import from_numpy

__all__ = ["TorchPlayer"]

_PLAIN = (bool, int, float, str, type(None), tuple, list)


class TorchPlayer:
    """Recorded values as torch tensors."""

    dialect: Dialect = TorchDialect()

    def tensor(self, values: npt.NDArray[np.generic], like: torch.nn.Module, dtype: str | None) -> torch.Tensor:
        state = next(chain(like.parameters(), like.buffers()), None)
        tensor = from_numpy(values).to("cpu" if state is None else state.device)
        return tensor.to(getattr(torch, dtype)) if dtype is not None and tensor.is_floating_point() else tensor

    def differentiable(self, tensor: torch.Tensor) -> torch.Tensor:
        # A leaf must not be changed in place; what is made from it may.
        return tensor.requires_grad_().clone() if tensor.is_floating_point() else tensor

    def moved(self, module: torch.nn.Module, dtype: str | None, device: str | None) -> torch.nn.Module:
        try:
            return module.to(device=device, dtype=None if dtype is None else getattr(torch, dtype))
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"the module cannot be moved to {device or dtype}: {error}") from error

    def own_gradients(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        own: list[torch.Tensor | None] = [None] * len(outputs)
        later: list[int] = []
        # A later output may depend on an earlier one, never the other way round.
        for place in sorted(range(len(outputs)), key=lambda at: -outputs[at].grad_fn._sequence_nr()):
            own[place] = gradients[place].to(outputs[place].dtype)
            if later:
                sent = [own[at] for at in later]
                made = [outputs[at] for at in later]
                (inner,) = torch.autograd.grad(made, outputs[place], sent, retain_graph=True, allow_unused=True)
                if inner is not None:
                    own[place] = own[place] - inner
            later.append(place)
        return own

    def backward(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        sent = [gradient.to(output.dtype) for output, gradient in zip(outputs, gradients, strict=True)]
        torch.autograd.backward(list(outputs), sent)

    def named(self, value: OpaqueValue) -> torch.dtype | torch.device:
        if value.kind == "dtype" and isinstance(found := getattr(torch, value.text, None), torch.dtype):
            return found
        try:
            return torch.device(value.text)
        except RuntimeError as error:
            raise UsageError(f"torch has no {value.kind} {value.text}") from error

    def plain_source(self, module: torch.nn.Module) -> str | None:
        if not type(module).__module__.startswith("torch.nn.modules.") or list(module.children()):
            return None
        source = f"torch.nn.{module!r}"
        try:
            built = eval(source, {"torch": torch})  # the repr of a torch module mostly builds it
        except Exception:
            return None
        same = [_plain(built) == _plain(module), _shapes(built) == _shapes(module), "forward" not in vars(module)]
        return source if type(built) is type(module) and all(same) else None


def _plain(module: torch.nn.Module) -> dict[str, Any]:
    """Return the plain settings of a module, without its mode, which a script sets itself."""
    kept = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in kept.items() if isinstance(value, _PLAIN)}


def _shapes(module: torch.nn.Module) -> dict[str, Any]:
    return {name: tensor.shape for name, tensor in chain(module.named_parameters(), module.named_buffers())}

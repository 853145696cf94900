"""What replaying a module asks of a framework beyond watching it: recorded values become tensors again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tensortap.core.arguments import OpaqueValue
from tensortap.frameworks.base import Framework

__all__ = ["FLOATS", "Player", "player_of"]

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that a module can be moved to."""


class Player(Protocol):
    """The questions. `frameworks.torch_player` and `frameworks.paddle_player` answer them."""

    def tensor(self, values: npt.NDArray[np.generic], like: Any, dtype: str | None) -> Any:
        """A tensor with these values on the device of the module `like`; floating point numbers take the dtype, if one
        is given."""

    def differentiable(self, tensor: Any) -> Any:
        """The same values as an input that takes part in autograd, if they can; a module may change it in place."""

    def moved(self, module: Any, dtype: str | None, device: str | None) -> Any:
        """The module with its floating point state in another dtype, and all of it on another device."""

    def own_gradients(self, outputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Of each output's whole gradient, what came from outside: not through other outputs that were made from it."""

    def backward(self, outputs: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Backward from the outputs with these gradients."""

    def named(self, told: OpaqueValue) -> Any:
        """The dtype or device that is called so."""

    def plain_source(self, module: Any) -> str | None:
        """An expression that builds the same module with the framework alone; None if there is none."""


def player_of(framework: Framework) -> Player:
    """The one that knows the framework's tensors."""
    if framework.name == "torch":
        from tensortap.frameworks.torch.player import TorchPlayer

        return TorchPlayer()
    from tensortap.frameworks.paddle.player import PaddlePlayer

    return PaddlePlayer()

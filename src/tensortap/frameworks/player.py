"""The contract for replaying a recorded call: recorded values as tensors, and the lines of a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tensortap.core.arguments import OpaqueValue
from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import ReplayedCalls

__all__ = ["FLOATS", "Dialect", "Player", "player_of"]

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that a module can be moved to."""


class Dialect(Protocol):
    """The lines of a reproduction script that differ by framework. Arguments and results are expressions."""

    name: str
    imports: str
    """Import statements for the names that `helpers` and the other lines use."""
    helpers: str
    """Statements that define `recorded`, the tensors of the file, and `show(what, ours, theirs)`."""
    restore: str
    """Statements that write `recorded` values into the state of `module`."""

    def submodule(self, model: str, name: str) -> str:
        """Return a part of a model, by its name."""

    def moved_module(self, device: str | None, dtype: str | None) -> str:
        """Return a statement that moves `module`; "" if there is nothing to do."""

    def moved(self, tensor: str, device: str | None, dtype: str | None) -> str:
        """Return a tensor on another device or in another dtype."""

    def leaf(self, variable: str, tensor: str) -> str:
        """Return statements that create a variable with gradients."""

    def backward(self, outputs: list[str], gradients: list[str]) -> str:
        """Return a statement that runs backward from outputs, with gradients in the outputs' own dtype."""

    def parameter(self, name: str) -> str:
        """Return a parameter of `module`."""

    def norm(self, tensor: str) -> str:
        """Return the L2 norm of a tensor as a float."""

    def opaque(self, value: OpaqueValue) -> str:
        """Return a dtype or a device."""


class Player(Protocol):
    """Runs a recorded call again."""

    dialect: Dialect
    """The dialect of scripts that reproduce the call."""

    def tensor(self, values: npt.NDArray[np.generic], like: Any, dtype: str | None) -> Any:
        """Return a tensor with these values on the device of the module `like`.

        `dtype`, if given, converts floating point values.
        """

    def differentiable(self, tensor: Any) -> Any:
        """Return the same values as an input of autograd, which a module may change in place."""

    def moved(self, module: Any, dtype: str | None, device: str | None) -> Any:
        """Return the module with its floating point state in another dtype, and all state on another device."""

    def own_gradients(self, outputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Return the part of each output's gradient that came from outside, not through other outputs of the call."""

    def backward(self, outputs: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Run backward from the outputs with these gradients."""

    def named(self, value: OpaqueValue) -> Any:
        """Return the dtype or device with this name."""

    def plain_source(self, module: Any) -> str | None:
        """Return an expression that builds the same module with the framework alone; None if there is none."""


def player_of(framework: Framework) -> Player:
    """Return the player, which replays calls of this framework."""
    supported: ReplayedCalls = require(framework, ReplayedCalls, "replaying recorded calls")
    return supported.player()

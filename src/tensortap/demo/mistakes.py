"""The mistakes that the demo can plant in its candidate, each in one module, as they occur in practice.

Each function gets the module that it changes, and the optimizer. None draws a random number or changes the module's
name or class, so that the rest of the two runs is the same. `tensortap demo --list` prints them.
"""
# mypy: disable-error-code=method-assign
# (most mistakes replace a method of one module)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # this module does not import torch
    from torch import Tensor
    from torch.nn import Dropout, Linear
    from torch.optim import Optimizer

    from tensortap.demo.model import Attention, Block, Core, Norm, Rotary

__all__ = ["MISTAKES", "Mistake"]

Change = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Mistake:
    """One mistake in the candidate."""

    name: str
    where: str
    """The module with the mistake, which a comparison should name."""
    what: str
    """A short description."""
    apply: Change

    def plant(self, model: Any, optimizer: Any) -> None:
        """Plant the mistake in a model before its training."""
        self.apply(model.get_submodule(self.where), optimizer)


MISTAKES: dict[str, Mistake] = {}
"""All mistakes by name."""


def mistake(where: str, what: str) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        name = change.__name__.replace("_", "-")
        MISTAKES[name] = Mistake(name, where, what, change)
        return change

    return add


# --- wrong settings -------------------------------------------------------------------------------------------------


@mistake("layers.2.norm2", "epsilon is 1e-5, not 1e-6")
def norm_epsilon(norm: Norm, _: Optimizer) -> None:
    norm.eps = 1e-5


@mistake("layers.1.attention.core", "scores are scaled by the whole width, not the head's")
def attention_scale(core: Core, _: Optimizer) -> None:
    core.scale = 64**-0.5


@mistake("layers.3.mlp.act", "GELU is approximated by tanh, not exact")
def gelu_tanh(act: Any, _: Optimizer) -> None:
    act.approximate = "tanh"


@mistake("layers.0.attention.rotary", "the rotary base is 500,000, not 10,000")
def rope_base(rotary: Rotary, _: Optimizer) -> None:
    rotary.base = 500_000.0


@mistake("layers.2.mlp.dropout", "dropout of 10 % was left on")
def dropout_left_on(dropout: Dropout, _: Optimizer) -> None:
    dropout.p = 0.1


# --- wrong code -----------------------------------------------------------------------------------------------------


@mistake("layers.1.attention.core", "the mask lets each letter see the next one")
def causal_off_by_one(core: Core, _: Optimizer) -> None:
    core.hidden = 2


@mistake("layers.3.attention.core", "the mask leaves the first letter nothing to attend to")
def nan(core: Core, _: Optimizer) -> None:
    core.hidden = 0


@mistake("layers.1.attention", "queries and keys are swapped")
def packed_order(attention: Attention, _: Optimizer) -> None:
    right = attention.unpack

    def unpack(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = right(packed)
        return k, q, v

    attention.unpack = unpack


@mistake("layers.2", "the residual around the attention is added twice")
def residual_twice(block: Block, _: Optimizer) -> None:
    def forward(x: Tensor) -> Tensor:
        x = x + (x + block.attention(block.norm1(x)))
        return x + block.mlp(block.norm2(x))

    block.forward = forward


@mistake("layers.2.attention.core", "softmax is computed in bfloat16")
def bf16_softmax(core: Core, _: Optimizer) -> None:
    core.softmax = lambda scores: scores.bfloat16().softmax(-1).to(scores.dtype)


# --- right forward, wrong backward ----------------------------------------------------------------------------------


@mistake("layers.1", "the attention's input is detached: no gradient returns")
def detached_branch(block: Block, _: Optimizer) -> None:
    def forward(x: Tensor) -> Tensor:
        x = x + block.attention(block.norm1(x.detach()))
        return x + block.mlp(block.norm2(x))

    block.forward = forward


@mistake("layers.0.attention.out", "the weight's gradient is rounded to bfloat16")
def bf16_gradient(linear: Linear, _: Optimizer) -> None:
    linear.weight.register_hook(lambda gradient: gradient.bfloat16().to(gradient.dtype))


# --- right gradients, wrong state -----------------------------------------------------------------------------------


@mistake("norm", "the last norm is in the group with weight decay")
def weight_decay_group(norm: Norm, optimizer: Optimizer) -> None:
    decaying, spared = optimizer.param_groups
    spared["params"] = [parameter for parameter in spared["params"] if parameter is not norm.weight]
    decaying["params"].append(norm.weight)


@mistake("layers.1.mlp.down", "one row of the weight was loaded as zeros")
def corrupted_checkpoint(linear: Linear, _: Optimizer) -> None:
    linear.weight.data[11] = 0.0

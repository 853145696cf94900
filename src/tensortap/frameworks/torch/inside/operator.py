"""The operator that compiled code calls with its tensors.

It returns nothing and has an ordered effect, so the compiler neither drops, repeats nor reorders it, and breaks no
graph. A forward that runs again in a compiled backward (activation checkpointing) does not contain it.

The number of a module is a 0-d tensor, not an int: an int would be a constant of the graph, and each of many equal
layers would be compiled by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch._C import _current_autograd_node
from torch._C._autograd import _get_sequence_nr
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from tensortap.frameworks.capabilities import GraphCall, GraphReceiver

__all__ = ["OPERATOR", "GradientTap", "new_number", "receivers"]

OPERATOR = "tensortap::tap"
_SCHEMA = "tap(Tensor[] values, Tensor module, str event, int call, str spec) -> ()"


receivers: dict[int, GraphReceiver] = {}
"""By the number of a module. Code that outlives its tap finds none, and goes on."""

_numbers = count(1)


def new_number() -> int:
    """Return a number for a module, which no other module of the process gets."""
    return next(_numbers)


def _receive(values: Sequence[torch.Tensor], module: torch.Tensor, event: str, call: int, spec: str) -> None:
    if (receiver := receivers.get(int(module))) is not None:
        receiver.event(event, GraphCall(_graph_run(event), call), values, _parsed(spec))


def _graph_run(event: str) -> int:
    """Return a number that a forward of a compiled graph and its backward share: that of their node in autograd.

    The node of a compiled forward is made right before it runs, and no other is made meanwhile.
    """
    if event in ("enter", "leave"):
        return int(_get_sequence_nr()) - 1
    node = _current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


@lru_cache(65536)
def _parsed(spec: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(spec)
    return found


_library = torch.library.Library(OPERATOR.partition(":")[0], "FRAGMENT")
_library.define(_SCHEMA)
_library.impl("tap", _receive, "CompositeExplicitAutograd")
torch.library.register_fake(OPERATOR, lambda *_: None)
_register_effectful_op(torch.ops.tensortap.tap.default, _EffectType.ORDERED)


class GradientTap(torch.autograd.Function):  # type: ignore[misc]  # torch is optional, so it has no types here
    """The identity, whose backward shows the gradient to the tap.

    It returns a copy, because torch forbids to change a view in place that a function has made. Inductor drops the
    copy.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, module: torch.Tensor, event: str, call: int, spec: str) -> torch.Tensor:
        ctx.save_for_backward(module)
        ctx.event, ctx.call, ctx.spec = event, call, spec
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (module,) = ctx.saved_tensors
        torch.ops.tensortap.tap([gradient], module, ctx.event, ctx.call, ctx.spec)
        return gradient, None, None, None, None

"""The operator that compiled code calls with its tensors.

It returns nothing and has an ordered effect, so the compiler neither drops, repeats nor reorders it, and breaks no
graph. A forward that runs again in a compiled backward (activation checkpointing) does not contain it.

The number of a module is a 0-d tensor, not an int: an int would be a constant of the graph, and each of many equal
layers would be compiled separately. Everything else that a tap must know is in a table. Its key is a number that
depends on the content alone, because it is a constant of the graph, which a cache of compiled code may keep for another
process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any

import torch
from torch._C import _current_autograd_node
from torch._C._autograd import _get_sequence_nr
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from tensortap.frameworks.capabilities import GraphPoint, GraphReceiver

__all__ = ["OPERATOR", "GradientTap", "new_number", "new_point", "receivers"]

OPERATOR = "tensortap::tap"
_SCHEMA = "tap(Tensor[] values, Tensor module, int point) -> ()"


receivers: dict[int, GraphReceiver] = {}
"""By the number of a module."""

_numbers = count(1)


def new_number() -> int:
    """Return a number for a module, which no other module of the process gets."""
    return next(_numbers)


_points: dict[int, GraphPoint] = {}


def new_point(event: str, call: int, spec: Mapping[str, Any]) -> int:
    """Return the number of a point in compiled code, which `_receive` looks up."""
    text = json.dumps([event, call, spec])
    number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    _points.setdefault(number, GraphPoint(*json.loads(text)))
    return number


def _receive(values: Sequence[torch.Tensor], module: torch.Tensor, number: int) -> None:
    # This runs between the kernels of compiled code, on the thread that launches them.
    if (receiver := receivers.get(module.item())) is None or (point := _points.get(number)) is None:
        return  # code that outlives its tap, or that was not traced in this process
    # A forward of a compiled graph and its backward share the number of their node in autograd. The node of a compiled
    # forward is made right before it runs, and no other is made meanwhile.
    if point.event == "enter" or point.event == "leave":
        receiver.event(point, _get_sequence_nr() - 1, values)
    else:
        node = _current_autograd_node()
        receiver.event(point, -1 if node is None else node._sequence_nr(), values)


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
    def forward(ctx: Any, tensor: torch.Tensor, module: torch.Tensor, point: int) -> torch.Tensor:
        ctx.save_for_backward(module)
        ctx.point = point
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (module,) = ctx.saved_tensors
        torch.ops.tensortap.tap([gradient], module, ctx.point)
        return gradient, None, None

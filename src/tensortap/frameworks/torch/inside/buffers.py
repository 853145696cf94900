"""Memory of compiled code, which must keep a tapped tensor until its deferred read.

A tap may defer the read of its tensor, to read many in one launch, and holds the tensor meanwhile. That keeps its
memory from being allocated anew, but does not keep inductor's code from writing other values there. When inductor
generates code, it plans which buffers later ones take over, in place or after their last use. A tapped buffer is
therefore left out of that plan. The code frees it where another buffer would have taken it over, and allocates a new
one.

Other ways to change memory remain, as buffers of a model that are updated in place. So the read of a tensor is deferred
only after a trial, as for uncompiled code; see `capture.deferred.read_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["free_tapped", "reuse_untapped"]

_NAMES = "_tensortap_buffers"


def reuse_untapped(original: Callable[..., bool]) -> Callable[..., bool]:
    """Return the method of inductor's wrapper code that decides whether a buffer may be taken over."""

    def can_reuse(wrapper: Any, input_buffer: Any, output_buffer: Any = None) -> bool:
        return original(wrapper, input_buffer, output_buffer) and input_buffer.get_name() not in _tapped()

    return can_reuse


def free_tapped(original: Callable[..., None]) -> Callable[..., None]:
    """Return the method of inductor's wrapper code that frees a buffer, or leaves it to a later one."""

    def codegen_free(wrapper: Any, buffer: Any) -> None:
        from torch._inductor import ir

        anyway = getattr(type(wrapper).can_reuse, "__wrapped__", None)
        if anyway is None or isinstance(buffer, ir.InputBuffer) or buffer.get_name() not in _tapped():
            original(wrapper, buffer)
        elif anyway(wrapper, buffer):
            wrapper.freed.add(buffer.get_name())
            wrapper.writeline(wrapper.make_buffer_free(buffer))

    return codegen_free


def _tapped() -> frozenset[str]:
    """Return the names of the tapped buffers of the graph that is being compiled."""
    from torch._inductor.virtualized import V

    known: frozenset[str] | None = vars(V.graph).get(_NAMES)
    if known is None:
        known = frozenset(_names(V.graph))
        setattr(V.graph, _NAMES, known)
    return known


def _names(graph: Any) -> Iterator[str]:
    for operation in graph.operations:
        if getattr(operation, "op_overload", None) is torch.ops.tensortap.tap.default:
            for tensor in operation.inputs:
                name = tensor.get_name()
                yield name
                view = getattr(getattr(graph.name_to_buffer.get(name), "layout", None), "view", None)
                if view is not None:  # it is a part of a larger buffer
                    yield view.get_name()

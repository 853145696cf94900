"""Zooms into a module: runs two implementations on the same inputs and names the line where they part.

zooming.py    zoom_modules: traces both modules and decides
tracing.py    TracedCall: the operators of one call, forward and backward
matching.py   the values that two traces have in common
finding.py    OperatorFinding: the first operator that differs, and how
rows.py       all operators of both sides, aligned
result.py     Zoom: sentence, finding, rows
wording.py    the sentence
runs.py       zoom_runs: modules and inputs from two runs
verdict.py    zoom_comparison: the module that a comparison names
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.zoom.result import Zoom

__all__ = ["zoom"]


def zoom(
    reference: Any,
    candidate: Any,
    inputs: Any,
    keywords: Mapping[str, Any] | None = None,
    *,
    output_gradients: Mapping[str, Any] | None = None,
    exact: bool = True,
) -> Zoom:
    """Run two modules on the same inputs, operator by operator, and name the first line that differs.

    Both modules run forward and backward. Operators are aligned by the values they compute, so an added operator, or a
    fused one in the place of several, is not a difference in itself. Neither module is changed.

    reference, candidate: two torch modules with the same parameters.
    inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
    keywords: keyword arguments beside positional ones.
    output_gradients: gradients of outputs by path ("0" for a single output); fixed random values for the others.
    exact: repeat the comparison in float64 where results are not equal, which distinguishes mistakes from rounding.

    >>> result = tensortap.zoom(reference.layers[2].attn, candidate.layers[2].attn, hidden)
    >>> print(result)                                                           # doctest: +SKIP
    In attention.py:48, the candidate computes `q @ k.transpose(-2, -1)` without mul (the reference: ...).
    """
    from tensortap.zoom.tracing import Call
    from tensortap.zoom.zooming import zoom_modules

    positional: tuple[Any, ...]
    named = dict(keywords or {})
    if isinstance(inputs, Mapping):
        positional, named = (), {**inputs, **named}
    else:
        positional = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return zoom_modules(reference, candidate, Call(positional, named, dict(output_gradients or {})), exact=exact)

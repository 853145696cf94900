"""The parts of fused torch operators, so that a fused operator can be aligned with code that computes its parts."""
# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table

__all__ = ["expansions"]

_ATTENTION = "aten::_scaled_dot_product"


def expansions(func: Any) -> list[Callable[..., Any]]:
    """Return functions that compute the operator's result in smaller steps, each in another way."""
    name = func._schema.name
    if name.startswith(_ATTENTION):
        return [] if "backward" in name else [_attention, partial(_attention, scaled_first=True)]
    found = decomposition_table.get(func) if name.rpartition("::")[2] in _FUSED else None
    return [] if found is None else [found]


_FUSED = frozenset(
    [
        "addmm",
        "baddbmm",
        "addbmm",
        "addmv",
        "addcmul",
        "addcdiv",
        "lerp",
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "cudnn_batch_norm",
        "_fused_rms_norm",
        "rms_norm",
        "_softmax",
        "_log_softmax",
        "gelu",
        "silu",
        "mish",
        "glu",
        "hardswish",
        "hardsigmoid",
        "softplus",
        "elu",
        "leaky_relu",
        "log_sigmoid_forward",
        "nll_loss_forward",
        "mse_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "native_dropout",
        "var_mean",
        "std_mean",
        "logsumexp",
    ]
)
"""Operators that code may also write out in smaller steps."""


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    scaled_first: bool = False,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    scale: float | None = None,
    **_: Any,
) -> Any:
    """Compute attention as most models write it: scores, scale, mask, softmax, weighted sum.

    scaled_first: apply the scale to the query.
    """
    query, key, value = _same_heads(query, key, value)
    factor = _scale(query, scale)
    if scaled_first:
        scores = (query * factor) @ key.transpose(-2, -1)
    else:
        scores = query @ key.transpose(-2, -1) * factor
    return _weighted(scores, value, _is_causal(rest, is_causal), _mask(rest, attn_mask, attn_bias))


def _weighted(scores: torch.Tensor, value: torch.Tensor, is_causal: bool, mask: torch.Tensor | None) -> torch.Tensor:
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril().logical_not()
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, -1) @ value


def _same_heads(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Repeat the heads of keys and values that several heads of the query share."""
    heads = tensors[0].shape[-3] if tensors[0].ndim > 3 else 0
    return tuple(
        each.repeat_interleave(heads // each.shape[-3], -3) if heads and each.shape[-3] != heads else each
        for each in tensors
    )


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _is_causal(rest: tuple[Any, ...], named: bool) -> bool:
    return named or any(value is True for value in rest)


def _mask(rest: tuple[Any, ...], *named: torch.Tensor | None) -> torch.Tensor | None:
    return next((each for each in (*named, *rest) if isinstance(each, torch.Tensor)), None)

"""An attention that leaves padding out, as FlashAttention does: its mask is that of padding, where it returns zeros.

Written with plain tensors, so that it runs where such kernels do not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

__all__ = ["UNPADDED_ATTENTION", "register"]

UNPADDED_ATTENTION = "unpadded"


def register() -> None:
    """Make it known to transformers under its name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(UNPADDED_ATTENTION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(UNPADDED_ATTENTION, flash_attention_mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute each text alone, without its padding. Queries and keys are of the same text."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    texts = [
        _one_text(*one, None if attention_mask is None else attention_mask[number], scaling, causal, sliding_window)
        for number, one in enumerate(zip(query, key, value, strict=True))
    ]
    return torch.stack(texts).transpose(1, 2).contiguous(), None


def _one_text(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Tensor | None,
    scaling: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    length = query.shape[1]
    tokens = torch.arange(length) if kept is None else kept.nonzero().flatten()
    place = torch.arange(len(tokens))
    distance = place[:, None] - place
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if window:
        seen &= distance < window
    parts = (each[:, tokens] for each in (query, key, value))
    made = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scaling)
    return made.new_zeros(made.shape[0], length, made.shape[2]).index_copy(1, tokens, made)

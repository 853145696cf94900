"""Two kinds of attention that differ at padding which sees nothing, and masks of such padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["LENGTH", "ROWS", "WIDTH", "PaddedAttention", "causal_mask", "padding_mask"]

ROWS, LENGTH, WIDTH = 4, 10, 16
_PADDING = (0, 2, 5, 1)


class PaddedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores, mask = q @ k.transpose(1, 2) / 4, attention_mask[:, 0]
        if mask.dtype == torch.bool:  # a position that sees nothing gets zeros
            return self.out(scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0) @ v)
        return self.out((scores + mask).softmax(-1) @ v)  # or the mean of everything


def padding_mask() -> Tensor:
    """Return a mask of 0 and 1 for ROWS texts of LENGTH tokens, most of which begin with padding."""
    return (torch.arange(LENGTH) >= torch.tensor(_PADDING)[:, None]).long()


def causal_mask(attention_mask: Tensor, boolean: bool) -> Tensor:
    """Return a causal mask, without padding, in one of two conventions."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & attention_mask.bool()[:, None, None, :]
    return mask if boolean else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)

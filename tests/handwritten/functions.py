"""The same functions in other ways, as people write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor


def attention_by_hand(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Attention as three lines of code; a boolean mask says what is seen."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -1e9) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1) @ value


def attention_by_einsum(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """The same by einsum, with the query scaled first and an additive mask."""
    scores = torch.einsum("bhid,bhjd->bhij", query * query.shape[-1] ** -0.5, key)
    lowest = torch.finfo(scores.dtype).min
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], lowest, dtype=scores.dtype).triu(1)
    if attn_mask is not None:
        added = attn_mask if attn_mask.is_floating_point() else torch.where(attn_mask, 0.0, lowest).to(scores.dtype)
        scores = scores + added
    return torch.einsum("bhij,bhjd->bhid", F.softmax(scores.float(), -1).to(value.dtype), value)


def norm_by_hand(x: Tensor, shape: object, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """A layer norm over the last axis."""
    dtype, x = x.dtype, x.float()
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return ((x - mean) * torch.rsqrt(variance + eps) * weight + bias).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2.0)))


def cross_entropy_by_hand(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """The logarithm of a sum of exponentials, less the logit of the target."""
    kept = target != ignore_index
    logits, target = logits[kept].float(), target[kept]
    largest = logits.max(-1, keepdim=True).values.detach()
    total = (logits - largest).exp().sum(-1).log() + largest.squeeze(-1)
    return (total - logits.gather(-1, target[:, None]).squeeze(-1)).mean()


def cross_entropy_in_chunks(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """A part of the positions after the other."""
    parts = zip(logits.chunk(3), target.chunk(3), strict=True)
    sums = [F.cross_entropy(*part, ignore_index=ignore_index, reduction="sum") for part in parts]
    return torch.stack(sums).sum() / (target != ignore_index).sum()


def conv_by_unfold(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, groups: int) -> Tensor:
    """A convolution as one product of matrices."""
    rows, _, height, width = x.shape
    size = weight.shape[-1]
    columns = F.unfold(x, size, padding=padding, stride=stride)
    columns = columns.view(rows, groups, -1, columns.shape[-1])
    matrix = weight.view(groups, weight.shape[0] // groups, -1)
    out = torch.einsum("gok,ngkp->ngop", matrix, columns).flatten(1, 2)
    out = out if bias is None else out + bias[None, :, None]
    return out.unflatten(-1, ((height + 2 * padding - size) // stride + 1, (width + 2 * padding - size) // stride + 1))

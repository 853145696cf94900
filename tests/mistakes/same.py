"""Equivalent implementations, equal up to rounding. `self` is the module whose method they replace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .patches import does
from .running import Training


def everywhere(
    cls: type[nn.Module], function: Callable[..., Any], method: str = "forward"
) -> Callable[[Training], None]:
    """Every module of that class does it that way."""

    def apply(training: Training) -> None:
        for name, module in training.model.named_modules():
            if type(module) is cls:
                does(name, function, method)(training)

    return apply


# --- products ---------------------------------------------------------------------------------------------------------


def linear_summed_in_two(share: float) -> Callable[..., Tensor]:
    """The sum over the inputs is broken at some place, as split-K kernels do."""

    def forward(self: Any, x: Tensor) -> Tensor:
        cut = int(self.in_features * share)
        left, right = F.linear(x[..., :cut], self.weight[:, :cut]), F.linear(x[..., cut:], self.weight[:, cut:])
        return left + right if self.bias is None else left + right + self.bias

    return forward


def sums_in_two(share: float) -> Callable[[Training], None]:
    """All linear layers do it: the rounding noise of another kernel, or of another chip."""
    return everywhere(nn.Linear, linear_summed_in_two(share))


def linear_in_chunks(self: Any, x: Tensor) -> Tensor:
    """Half of the batch after the other."""
    return torch.cat([F.linear(part, self.weight, self.bias) for part in x.chunk(2)])


def conv_in_chunks(self: Any, x: Tensor) -> Tensor:
    return torch.cat([F.conv2d(part, self.weight, self.bias, self.stride, self.padding) for part in x.chunk(2)])


def conv_by_matrix(self: Any, x: Tensor) -> Tensor:
    size = self.kernel_size[0]
    columns = F.unfold(x, size, padding=self.padding[0], stride=self.stride[0])
    out = (x.shape[2] + 2 * self.padding[0] - size) // self.stride[0] + 1
    result = (self.weight.flatten(1) @ columns).unflatten(2, (out, -1))
    return result if self.bias is None else result + self.bias[:, None, None]


def embedding_by_matrix(self: Any, tokens: Tensor) -> Tensor:
    return F.one_hot(tokens, self.num_embeddings).to(self.weight.dtype) @ self.weight


# --- attention --------------------------------------------------------------------------------------------------------


def causal_core_fused(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)


def causal_core_scaled_first(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scale goes into the queries, and the largest score is taken off before the exponential."""
    scores = (q * self.scale) @ k.transpose(-2, -1)
    scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def padded_core_fused(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    bias = torch.zeros(mask.shape).masked_fill(~mask, self.blocked)[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)


def attention_explicit(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
    return self.out((weights @ v).transpose(1, 2).flatten(2))


# --- norms and activations --------------------------------------------------------------------------------------------


def rms_norm_library(self: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rms_norm_in_double(self: Any, x: Tensor) -> Tensor:
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def layer_norm_by_hand(self: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def batch_norm_by_hand(self: Any, x: Tensor) -> Tensor:
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
    with torch.no_grad():
        count = x.numel() / x.shape[1]
        self.running_mean.lerp_(mean.flatten().to(self.running_mean.dtype), self.momentum)
        unbiased = variance.flatten() * count / (count - 1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        self.num_batches_tracked.add_(1)
    normed = (x - mean) / (variance + self.eps).sqrt()
    return normed * self.weight[:, None, None] + self.bias[:, None, None]


def gelu_by_erf(self: Any, x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def silu_by_sigmoid(self: Any, x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


# --- cells, experts, losses -------------------------------------------------------------------------------------------


def cell_library(self: Any, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return torch.lstm_cell(x, (h, c), self.weight_x, self.weight_h, self.bias, torch.zeros_like(self.bias))


def gates_in_one_product(self: Any, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    both = F.linear(torch.cat((x, h), -1), torch.cat((self.weight_x, self.weight_h), -1), self.bias)
    return both.chunk(4, -1)


def route_softmax_last(self: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the chosen scores alone is the renormalised softmax over all."""
    best, chosen = scores.topk(self.top, -1)
    return best.softmax(-1), chosen


def moe_stacked(self: Any, x: Tensor) -> Tensor:
    """Results are put side by side and summed at the end, in the order of each token's choice."""
    flat = x.flatten(0, -2)
    weights, chosen = self.route(self.router(flat))
    parts = torch.zeros(*chosen.shape, flat.shape[-1], dtype=flat.dtype)
    for number, expert in enumerate(self.experts):
        rows, slots = (chosen == number).nonzero(as_tuple=True)
        parts = parts.index_put((rows, slots), expert(flat[rows]).to(flat.dtype))
    return (weights[:, None, :] @ parts).view_as(x)


def cross_entropy_by_hand(logits: Tensor, target: Tensor) -> Tensor:
    right = logits.gather(-1, target[:, None]).squeeze(-1)
    return (logits.logsumexp(-1) - right).sum() / len(target)


def layers_checkpointed(training: Training) -> None:
    """Activations are computed again in backward instead of being kept."""
    for layer in training.model.get_submodule("layers").children():
        inner = type(layer).forward.__get__(layer)
        layer.forward = lambda *args, inner=inner, **kwargs: checkpoint(inner, *args, use_reentrant=False, **kwargs)

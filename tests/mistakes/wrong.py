"""Wrong implementations with which the zoo replaces methods. `self` is the changed module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor

from .models import HEADS, WIDTH, split_heads

# --- a decoder's ------------------------------------------------------------------------------------------------------


def softmax_in_bf16(self: Any, scores: Tensor) -> Tensor:
    return scores.bfloat16().softmax(-1).float()


def rotate_interleaved(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs neighbours, where the tables are for halves."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


def split_without_transpose(self: Any, x: Tensor) -> Tensor:
    batch, length, width = x.shape
    return x.view(batch, self.heads, length, width // self.heads)


def positions_from_one(self: Any, length: int) -> Tensor:
    return torch.arange(1, length + 1)


def stack_swapped(self: Any) -> list[Any]:
    return [self.layers[0], self.layers[2], self.layers[1]]


def residual_twice(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x + (x + self.attention(self.norm1(x), cos, sin))
    return x + self.mlp(self.norm2(x))


def residual_missing(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x + self.attention(self.norm1(x), cos, sin)
    return self.mlp(self.norm2(x))


def residual_of_normed(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = self.norm1(x)
    x = x + self.attention(x, cos, sin)
    return x + self.mlp(self.norm2(x))


def branch_detached(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x + self.attention(self.norm1(x.detach()), cos, sin)
    return x + self.mlp(self.norm2(x))


def gate_and_up_swapped(self: Any, x: Tensor) -> Tensor:
    return self.down(self.gate(x) * self.act(self.up(x)))


def gate_detached(self: Any, x: Tensor) -> Tensor:
    return self.down(self.act(self.gate(x)).detach() * self.up(x))


class _DoubledSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return 2 * gradient * gate * (1 + x * (1 - gate))


def silu_doubled(self: Any, x: Tensor) -> Tensor:
    return _DoubledSiLU.apply(x)


def rms_norm_half_backward(self: Any, x: Tensor) -> Tensor:
    """The gradient through the norm's own denominator is forgotten."""
    return x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + self.eps) * self.weight


# --- linear layers and convolutions -----------------------------------------------------------------------------------


def linear_transposed(self: Any, x: Tensor) -> Tensor:
    return x @ self.weight


def linear_without_bias(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight)


def linear_in_bf16(self: Any, x: Tensor) -> Tensor:
    bias = None if self.bias is None else self.bias.bfloat16()
    return F.linear(x.bfloat16(), self.weight.bfloat16(), bias).float()


class _CoarseWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).bfloat16().T @ x.flatten(0, -2).bfloat16()
        return gradient @ weight, of_weight.float()


def linear_bf16_weight_gradient(self: Any, x: Tensor) -> Tensor:
    return _CoarseWeightGradient.apply(x, self.weight)


def conv_bias_twice(self: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, self.weight, self.bias, self.stride, self.padding) + self.bias[:, None, None]


def conv_flipped(self: Any, x: Tensor) -> Tensor:
    """True convolution instead of correlation."""
    return F.conv2d(x, self.weight.flip(2, 3), self.bias, self.stride, self.padding)


# --- an encoder's -----------------------------------------------------------------------------------------------------


def layer_norm_unbiased(self: Any, x: Tensor) -> Tensor:
    deviation = (x.var(-1, keepdim=True) + self.eps).sqrt()
    return (x - x.mean(-1, keepdim=True)) / deviation * self.weight + self.bias


def norm_over_time(self: Any, x: Tensor) -> Tensor:
    deviation = (x.var(1, keepdim=True, correction=0) + self.eps).sqrt()
    return (x - x.mean(1, keepdim=True)) / deviation * self.weight + self.bias


def mask_inverted(self: Any, tokens: Tensor) -> Tensor:
    return tokens == 0


def pool_without_clamp(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def pool_by_where(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    total, count = (x * mask[..., None]).sum(1), mask.sum(1, keepdim=True)
    return torch.where(count > 0, total / count, torch.zeros(()))


def clear_in_place(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill_(~mask[..., None], 0.0)


def pre_norm(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
    return x + self.fc2(self.act(self.fc1(self.norm2(x))))


# --- a vision transformer's -------------------------------------------------------------------------------------------


def tokens_column_first(self: Any, x: Tensor) -> Tensor:
    x = x.transpose(2, 3).flatten(2).transpose(1, 2)
    return torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.places


def positions_late(self: Any, x: Tensor) -> Tensor:
    """The patches get the places that start at the class token's, which itself gets none."""
    x = x.flatten(2).transpose(1, 2) + self.places[:, :-1]
    return torch.cat((self.token.expand(len(x), -1, -1), x), 1)


def pool_by_mean(self: Any, x: Tensor) -> Tensor:
    return x.mean(1)


def sdpa_causal(self: Any, x: Tensor) -> Tensor:
    q, k, v = (split_heads(part, HEADS) for part in self.qkv(x).chunk(3, -1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.out(mixed.transpose(1, 2).flatten(2))


# --- a residual network's ---------------------------------------------------------------------------------------------


def batch_norm_biased(self: Any, x: Tensor) -> Tensor:
    """Keeps the variance over n where the framework keeps that over n - 1."""
    with torch.no_grad():
        values = x.to(self.running_mean.dtype)
        self.running_mean.lerp_(values.mean((0, 2, 3)), self.momentum)
        self.running_var.lerp_(values.var((0, 2, 3), correction=0), self.momentum)
        self.num_batches_tracked.add_(1)
    return F.batch_norm(x, None, None, self.weight, self.bias, True, self.momentum, self.eps)


def leaky_in_place(self: Any, x: Tensor) -> Tensor:
    return F.leaky_relu_(x, 0.01)


def join_late(self: Any, out: Tensor, x: Tensor) -> Tensor:
    return self.relu(out) + x


# --- a recurrent network's --------------------------------------------------------------------------------------------


def gates_swapped(self: Any, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = (F.linear(x, self.weight_x, self.bias) + F.linear(h, self.weight_h)).chunk(4, -1)
    return i, f, o, g


def cell_without_tanh(self: Any, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = self.gates(x, h)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c, c


def cell_hard_sigmoid(self: Any, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = self.gates(x, h)
    c = F.hardsigmoid(f) * c + F.hardsigmoid(i) * g.tanh()
    return F.hardsigmoid(o) * c.tanh(), c


def cell_truncated(self: Any, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = self.gates(x, h)
    c = f.sigmoid() * c.detach() + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def start_from_last(self: Any, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Each micro batch starts from the state that the one before left behind."""
    last = getattr(self, "last", None) or [(torch.zeros(batch, WIDTH), torch.zeros(batch, WIDTH)) for _ in self.cells]
    self.last = [(h.detach(), c.detach()) for h, c in last]  # forward writes the newest state into this list
    return self.last


# --- a mixture of experts' --------------------------------------------------------------------------------------------


def route_as_is(self: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = scores.softmax(-1).topk(self.top, -1)
    return weights, chosen


def route_detached(self: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = scores.softmax(-1).topk(self.top, -1)
    return weights / weights.sum(-1, keepdim=True).detach(), chosen


def moe_with_capacity(self: Any, x: Tensor) -> Tensor:
    """An expert's tokens past its capacity are left out."""
    flat = x.flatten(0, -2)
    weights, chosen = self.route(self.router(flat))
    total = torch.zeros_like(flat)
    for number, expert in enumerate(self.experts):
        rows, slots = (part[:24] for part in (chosen == number).nonzero(as_tuple=True))
        part = expert(flat[rows]) * weights[rows, slots, None]
        total = total.index_add(0, rows, part.to(total.dtype))
    return total.view_as(x)


# --- a training loop's ------------------------------------------------------------------------------------------------


class ClearedBetween:
    """Gradients are cleared between the two micro batches of a step: only the last one counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, optimizer: Any) -> None:
        self.count += 1
        if self.count % 2:
            optimizer.zero_grad()

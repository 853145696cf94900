"""Mistakes in families of models, and in hand-written modules, that `planted` does not have."""
# ruff: noqa: E501 - code of models is quoted as it is

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from zoom import held_out_later
from zoom.making import causal, library_text, own_source, randn, randomised
from zoom.planted import Mistake, Source

__all__ = ["MISTAKES", "RIGHT", "SOURCES"]

BF16 = torch.bfloat16


def _gemma2_config() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=3.0,
        vocab_size=64,
        attn_implementation="eager",
    )


def _gemma2_inputs(module: ModuleType, dtype: torch.dtype) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    hidden = randn(2, 7, 32).to(dtype)
    rotary = module.Gemma2RotaryEmbedding(_gemma2_config())(hidden, torch.arange(7)[None])
    return (hidden,), {"position_embeddings": rotary, "attention_mask": causal(7, dtype)}


def _neox_config() -> Any:
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        vocab_size=64,
        rotary_pct=0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_implementation="eager",
    )


def _neox_inputs(module: ModuleType, dtype: torch.dtype) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    hidden = randn(2, 7, 32).to(dtype)
    rotary = module.GPTNeoXRotaryEmbedding(_neox_config())(hidden, torch.arange(7)[None])
    return (hidden,), {"position_embeddings": rotary, "attention_mask": causal(7, dtype)}


def _t5_config() -> Any:
    from transformers import T5Config

    return T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_heads=4,
        vocab_size=64,
        dropout_rate=0.0,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        feed_forward_proj="gated-gelu",
        attn_implementation="eager",
    )


def _mixtral_config() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=64,
        experts_implementation="eager",
    )


def _convnext_config() -> Any:
    from transformers import ConvNextConfig

    return ConvNextConfig(layer_scale_init_value=0.5, hidden_sizes=[8, 8], depths=[1, 1], num_stages=2)


RECURRENT = """import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.xz, self.xr, self.xn = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.hz, self.hr, self.hn = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def cell(self, x, h):
        z = torch.sigmoid(self.xz(x) + self.hz(h))
        r = torch.sigmoid(self.xr(x) + self.hr(h))
        n = torch.tanh(self.xn(x) + r * self.hn(h))
        return (1 - z) * n + z * h

    def forward(self, x):
        h = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            states.append(h)
        return torch.stack(states, 1)
"""

CONTRASTIVE = """import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.codes = nn.Parameter(torch.randn(5, 8))

    def quantise(self, x):
        distance = torch.cdist(x, self.codes)
        nearest = self.codes[distance.argmin(-1)]
        return x + (nearest - x).detach()

    def forward(self, x):
        a = self.left(x)
        a = a / a.norm(dim=-1, keepdim=True)
        b = self.right(self.quantise(x))
        b = b / b.norm(dim=-1, keepdim=True)
        logits = a @ b.t() / 0.1
        positive = logits.diagonal()
        loss = torch.logsumexp(logits, 1) - positive
        weight = (1 - torch.exp(-loss)) ** 2
        penalty = (a - b).pow(2).sum(-1)
        return (weight * loss).mean() + 0.5 * penalty.mean()
"""

SCAN = """import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.decay = nn.Parameter(torch.rand(2))
        self.norm = nn.GroupNorm(2, 16)
        self.out = nn.Linear(16, 16)

    def split(self, x):
        return x.unflatten(-1, (2, 8)).transpose(1, 2)

    def forward(self, x):
        q = F.elu(self.split(self.q(x))) + 1
        k = F.elu(self.split(self.k(x))) + 1
        v = self.split(self.v(x))
        steps = torch.arange(x.shape[1])
        distance = (steps[:, None] - steps[None, :]).clamp(min=0)
        scores = q @ k.transpose(-2, -1)
        scores = scores * torch.exp(-self.decay[:, None, None] * distance)
        scores = scores.tril()
        total = scores.float().sum(-1, keepdim=True).to(x.dtype)
        y = (scores / (total + 1e-6)) @ v
        y = y.transpose(1, 2).flatten(2)
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        gate = F.silu(x)
        return self.out(y * gate) + x
"""

CONVOLUTION = """import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.join = nn.Conv2d(12, 4, 1)
        self.film = nn.Linear(4, 16)
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x):
        h = self.down(x)
        h = self.norm(h)
        scale, shift = self.film(x.mean((2, 3))).chunk(2, -1)
        h = h * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
        h = self.mid(F.silu(h))
        h = F.avg_pool2d(h, 2)
        h = F.interpolate(h, scale_factor=4, mode="nearest")
        h = torch.cat([h, x], 1)
        return self.join(h) / 2**0.5
"""

COMPLEX = """import torch, torch.nn as nn, torch.nn.functional as F

class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step):
        ctx.step = step
        ctx.save_for_backward(x)
        return (x / step).round() * step

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient * (x.abs() < 0.2).to(gradient), None

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(8, 16)
        self.v = nn.Linear(8, 8)

    def rotate(self, x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (4, 2)))
        angles = torch.outer(torch.arange(x.shape[1]), 10.0 ** -torch.arange(4))
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2).to(x)

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        q, k = self.rotate(q), self.rotate(k)
        v = Rounded.apply(self.v(x), 0.01)
        slopes = torch.arange(x.shape[1])[None, :] - torch.arange(x.shape[1])[:, None]
        scores = q @ k.mT / 8**0.5 + 0.1 * slopes
        scores = scores.masked_fill(slopes > 0, float("-inf"))
        log_p = scores.log_softmax(-1)
        entropy = -(log_p.exp() * log_p.clamp(min=-50)).sum(-1)
        y = log_p.exp() @ v
        return y, entropy.mean()
"""


def _gpt2_config() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        n_embd=32, n_head=4, n_inner=48, vocab_size=64, reorder_and_upcast_attn=True, attn_implementation="eager"
    )


SOURCES: dict[str, Source] = {
    "gemma2": Source(
        library_text("gemma2"),
        lambda module, dtype: randomised(module.Gemma2DecoderLayer(_gemma2_config(), 1), dtype),
        _gemma2_inputs,
    ),
    "gpt_neox": Source(
        library_text("gpt_neox"),
        lambda module, dtype: randomised(module.GPTNeoXLayer(_neox_config(), 0), dtype),
        _neox_inputs,
    ),
    "t5": Source(
        library_text("t5"),
        lambda module, dtype: randomised(module.T5Block(_t5_config(), True, 0), dtype),
        lambda module, dtype: ((randn(2, 7, 32).to(dtype),), {}),
    ),
    "mixtral": Source(
        library_text("mixtral"),
        lambda module, dtype: randomised(module.MixtralSparseMoeBlock(_mixtral_config()), dtype),
        lambda module, dtype: ((randn(2, 6, 16).to(dtype),), {}),
    ),
    "convnext": Source(
        library_text("convnext"),
        lambda module, dtype: randomised(module.ConvNextLayer(_convnext_config(), 8), dtype),
        lambda module, dtype: ((randn(2, 8, 6, 6).to(dtype),), {}),
    ),
    "gpt2": Source(
        library_text("gpt2"),
        lambda module, dtype: randomised(module.GPT2Block(_gpt2_config(), 0), dtype),
        lambda module, dtype: ((randn(2, 7, 32).to(dtype),), {"attention_mask": causal(7, dtype)}),
    ),
    "convolution": own_source(CONVOLUTION, 2, 4, 8, 8),
    "complex": own_source(COMPLEX, 2, 6, 8),
    "recurrent": own_source(RECURRENT, 2, 4, 8),
    "contrastive": own_source(CONTRASTIVE, 6, 8),
    "scan": own_source(SCAN, 2, 6, 16),
    **held_out_later.SOURCES,
}

_SOFTCAP = """    if softcap is not None:
        attn_weights = attn_weights / softcap
        attn_weights = torch.tanh(attn_weights)
        attn_weights = attn_weights * softcap
"""
_MASK = """    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask
"""
_QKV = """        qkv = self.query_key_value(hidden_states).view(hidden_shape).transpose(1, 2)
        query_states, key_states, value_states = qkv.chunk(3, dim=-1)
"""
_OTHER_QKV = """        qkv = self.query_key_value(hidden_states).view(*input_shape, 3, -1, self.head_size)
        query_states, key_states, value_states = qkv.permute(2, 0, 3, 1, 4).unbind(0)
"""
_ADDED_NEOX = {
    "hidden_states = mlp_output + attn_output + hidden_states": "hidden_states = mlp_output + (attn_output + 0.0) + hidden_states"
}
_FUSED_SCAN = {"gate = F.silu(x)": "gate = x * torch.sigmoid(x)"}

MISTAKES: tuple[Mistake, ...] = (
    Mistake("mask before softcap", "gemma2", _SOFTCAP + _MASK, _MASK + _SOFTCAP, lines=6),
    Mistake("softcap without its factor", "gemma2", "attn_weights = attn_weights * softcap", "pass", or_reference=True),
    Mistake(
        "norm weight without one", "gemma2", "output * (1.0 + self.weight.float())", "output * self.weight.float()"
    ),
    Mistake("gemma norm not upcast", "gemma2", "self._norm(x.float())", "self._norm(x)", BF16),
    Mistake(
        "norm after the residual",
        "gemma2",
        "hidden_states = self.post_attention_layernorm(hidden_states)\n        hidden_states = residual + hidden_states",
        "hidden_states = residual + hidden_states\n        hidden_states = self.post_attention_layernorm(hidden_states)",
        lines=2,
    ),
    Mistake("scale of the head", "gemma2", "scaling=self.scaling", "scaling=self.head_dim**-0.5"),
    Mistake(
        "chunks in another order",
        "gpt_neox",
        "query_states, key_states, value_states = qkv",
        "query_states, value_states, key_states = qkv",
    ),
    Mistake("heads interleaved in another way", "gpt_neox", _QKV, _OTHER_QKV, lines=2),
    Mistake(
        "serial for parallel residual",
        "gpt_neox",
        "mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))",
        "mlp_output = self.mlp(self.post_attention_layernorm(hidden_states + attn_output))",
    ),
    Mistake(
        "rotary of the last dimensions",
        "gpt_neox",
        "q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]",
        "q_pass, q_rot = q[..., :rotary_dim], q[..., rotary_dim:]",
    ),
    Mistake(
        "joined in another order",
        "gpt_neox",
        "torch.cat([k_embed, k_pass], dim=-1)",
        "torch.cat([k_pass, k_embed], dim=-1)",
        more=_ADDED_NEOX,
    ),
    Mistake(
        "values detached",
        "gpt_neox",
        "torch.matmul(attn_weights, value)",
        "torch.matmul(attn_weights, value.detach())",
        more=_ADDED_NEOX,
    ),
    Mistake("bias transposed", "t5", "values.permute([2, 0, 1])", "values.permute([2, 1, 0])"),
    Mistake(
        "relative position reversed", "t5", "memory_position - context_position", "context_position - memory_position"
    ),
    Mistake("gate added", "t5", "hidden_gelu * hidden_linear", "hidden_gelu + hidden_linear"),
    Mistake("sum of squares", "t5", "pow(2).mean(-1", "pow(2).sum(-1"),
    Mistake("one direction", "t5", "bidirectional=(not self.is_decoder)", "bidirectional=self.is_decoder"),
    Mistake(
        "bias dropped",
        "t5",
        "attn_weights = attn_weights + position_bias",
        "attn_weights = attn_weights + 0 * position_bias",
    ),
    Mistake(
        "layer scale dropped", "convnext", "features = self.layer_scale_parameter * features", "pass", or_reference=True
    ),
    Mistake(
        "permuted back wrongly",
        "convnext",
        "features.permute(0, 3, 1, 2)  # (N, H",
        "features.permute(0, 3, 2, 1)  # (N, H",
    ),
    Mistake(
        "input changed in place",
        "convnext",
        "features = self.dwconv(features)",
        "features = self.dwconv(features.mul_(0.9))",
    ),
    Mistake(
        "router not normalised",
        "mixtral",
        "router_top_value /= router_top_value.sum(dim=-1, keepdim=True)",
        "pass",
        or_reference=True,
    ),
    Mistake(
        "router over tokens",
        "mixtral",
        "softmax(router_logits.float(), dim=-1)",
        "softmax(router_logits.float(), dim=0)",
    ),
    Mistake("gate and up swapped", "mixtral", "gate, up = nn", "up, gate = nn"),
    Mistake(
        "experts overwritten",
        "mixtral",
        "final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))",
        "final_hidden_states[token_idx] = current_hidden_states.to(final_hidden_states.dtype)",
    ),
    Mistake(
        "weight of the first expert",
        "mixtral",
        "top_k_weights[token_idx, top_k_pos, None]",
        "top_k_weights[token_idx, 0, None]",
    ),
    Mistake("gate detached", "mixtral", "self.act_fn(gate) * up", "self.act_fn(gate.detach()) * up"),
    Mistake("update gate inverted", "recurrent", "(1 - z) * n + z * h", "z * n + (1 - z) * h"),
    Mistake("reset before the product", "recurrent", "r * self.hn(h)", "self.hn(r * h)"),
    Mistake("state cut off", "recurrent", "h = self.cell(x[:, t], h)", "h = self.cell(x[:, t], h.detach())"),
    Mistake("temperature", "contrastive", "a @ b.t() / 0.1", "a @ b.t()"),
    Mistake("over columns", "contrastive", "torch.logsumexp(logits, 1)", "torch.logsumexp(logits, 0)"),
    Mistake(
        "norm over the batch",
        "contrastive",
        "b = b / b.norm(dim=-1, keepdim=True)",
        "b = b / b.norm(dim=0, keepdim=True)",
    ),
    Mistake("sum for mean", "contrastive", "0.5 * penalty.mean()", "0.5 * penalty.sum()"),
    Mistake("no straight-through", "contrastive", "x + (nearest - x).detach()", "nearest.detach()"),
    Mistake(
        "weight with a gradient",
        "contrastive",
        "weight = (1 - torch.exp(-loss)) ** 2",
        "weight = ((1 - torch.exp(-loss)) ** 2).detach()",
    ),
    Mistake("decay without sign", "scan", "torch.exp(-self.decay", "torch.exp(self.decay"),
    Mistake("mask includes the future", "scan", "scores.tril()", "scores.tril(1)", more=_FUSED_SCAN),
    Mistake("total over queries", "scan", ".sum(-1, keepdim=True).to", ".sum(-2, keepdim=True).to", more=_FUSED_SCAN),
    Mistake(
        "softmax not upcast",
        "gpt_neox",
        "softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)",
        "softmax(attn_weights, dim=-1)",
        BF16,
    ),
    Mistake("keys without one", "scan", "k = F.elu(self.split(self.k(x))) + 1", "k = F.elu(self.split(self.k(x)))"),
    Mistake(
        "overwritten before the gate",
        "scan",
        "y = self.norm(y.transpose(1, 2)).transpose(1, 2)",
        "y = self.norm(y.transpose(1, 2)).transpose(1, 2); x *= 0.5",
    ),
    Mistake(
        "split in another order",
        "gpt2",
        "query_states, key_states, value_states = self.c_attn(hidden_states)",
        "key_states, query_states, value_states = self.c_attn(hidden_states)",
    ),
    Mistake("fused product without its scale", "gpt2", "beta=0, alpha=self.scaling)", "beta=0)"),
    Mistake(
        "fused product not upcast",
        "gpt2",
        "q.float(), k.float(), beta=0",
        "q.bfloat16().float(), k.bfloat16().float(), beta=0",
    ),
    Mistake(
        "weights of the upcast detached",
        "gpt2",
        "attn_weights = attn_weights.type(value.dtype)\n        attn_weights = self.attn",
        "attn_weights = attn_weights.detach().type(value.dtype)\n        attn_weights = self.attn",
    ),
    Mistake("scale without one", "convolution", "h * (1 + scale[:, :, None, None])", "h * scale[:, :, None, None]"),
    Mistake("mean over one dimension", "convolution", "x.mean((2, 3))", "x.amax(3).mean(2)"),
    Mistake("bilinear", "convolution", 'mode="nearest"', 'mode="bilinear"'),
    Mistake("joined the other way round", "convolution", "torch.cat([h, x], 1)", "torch.cat([x, h], 1)"),
    Mistake("maximum for mean", "convolution", "F.avg_pool2d(h, 2)", "F.max_pool2d(h, 2)"),
    Mistake(
        "skip changed in place", "convolution", "h = self.mid(F.silu(h))", "h = self.mid(F.silu(h)); x.clamp_(min=0)"
    ),
    Mistake("conjugated", "complex", "turned = pairs * torch.polar", "turned = pairs.conj() * torch.polar"),
    Mistake("slopes reversed", "complex", "+ 0.1 * slopes", "- 0.1 * slopes"),
    Mistake("diagonal hidden", "complex", "slopes > 0", "slopes >= 0"),
    Mistake(
        "straight gradient",
        "complex",
        "return gradient * (x.abs() < 0.2).to(gradient), None",
        "return gradient * 1.0, None",
    ),
    Mistake(
        "entropy with a gradient cut", "complex", "log_p.exp() * log_p.clamp", "log_p.exp().detach() * log_p.clamp"
    ),
    Mistake("sum for mean of the entropy", "complex", "entropy.mean()", "entropy.sum()"),
    *held_out_later.MISTAKES,
)

RIGHT: dict[str, tuple[str, Mapping[str, str]]] = {
    "unfused product": (
        "gpt2",
        {
            "torch.baddbmm(attn_weights, q.float(), k.float(), beta=0, alpha=self.scaling)": "(q.float() * self.scaling) @ k.float()"
        },
    ),
    "addcmul": (
        "convolution",
        {
            "h * (1 + scale[:, :, None, None]) + shift[:, :, None, None]": "torch.addcmul(h + shift[:, :, None, None], h, scale[:, :, None, None])"
        },
    ),
    "rotation in real numbers": (
        "complex",
        {
            "turned = pairs * torch.polar(torch.ones_like(angles), angles)": "a, b, c, s = pairs.real, pairs.imag, angles.cos(), angles.sin()",
            "torch.view_as_real(turned).flatten(-2)": "torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)",
        },
    ),
    "norm weight written out": (
        "gemma2",
        {"output = output * (1.0 + self.weight.float())": "output = output + output * self.weight.float()"},
    ),
    "scaled query": (
        "gemma2",
        {
            "torch.matmul(query, key_states.transpose(2, 3)) * scaling": "torch.matmul(query * scaling, key_states.transpose(2, 3))"
        },
    ),
    "rotary on both at once": (
        "gpt_neox",
        {
            "q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)": "both = torch.cat([q_rot, k_rot]); both = both * cos + rotate_half(both) * sin; q_embed, k_embed = both.chunk(2)",
            "    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)\n": "",
        },
    ),
    "bias added first": (
        "t5",
        {
            "attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling": "attn_weights = torch.einsum('bhqd,bhkd->bhqk', query, key) * scaling"
        },
    ),
    "experts by scatter": (
        "mixtral",
        {
            "final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))": "final_hidden_states = final_hidden_states.index_add(0, token_idx, current_hidden_states)"
        },
    ),
    "gates as one product": ("recurrent", {"(1 - z) * n + z * h": "torch.lerp(n, h, z)"}),
    "cross entropy": (
        "contrastive",
        {
            "loss = torch.logsumexp(logits, 1) - positive": "loss = F.cross_entropy(logits, torch.arange(len(x)), reduction='none')"
        },
    ),
    "masked by where": (
        "scan",
        {
            "scores = scores.tril()": "scores = torch.where(steps[:, None] >= steps[None, :], scores, torch.zeros_like(scores))"
        },
    ),
    "convolution for a linear layer": (
        "convnext",
        {
            "features = self.pwconv1(features)": "features = torch.nn.functional.conv2d(features.permute(0, 3, 1, 2), self.pwconv1.weight[:, :, None, None], self.pwconv1.bias).permute(0, 2, 3, 1)"
        },
    ),
    **held_out_later.RIGHT,
}
"""Other ways to write the same, by name: the source and its replacements."""

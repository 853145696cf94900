"""Further modules with mistakes, and other ways to write them; `held_out` joins them to its own."""
# ruff: noqa: E501 - code of models is quoted as it is

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from zoom.making import causal, library_text, own_source, randn, randomised
from zoom.planted import Mistake, Source

__all__ = ["MISTAKES", "RIGHT", "SOURCES"]


def _deepseek(module: ModuleType, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        n_routed_experts=8,
        num_local_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        experts_implementation="eager",
    )
    built = randomised(module.DeepseekV3MoE(config), dtype)
    built.gate.e_score_correction_bias.copy_(randn(8).to(dtype) * 0.1)
    return built


def _cohere_config() -> Any:
    from transformers import CohereConfig

    return CohereConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_qk_norm=True,
        attn_implementation="eager",
    )


def _cohere_inputs(module: ModuleType, dtype: torch.dtype) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    hidden = randn(2, 7, 32).to(dtype)
    rotary = module.CohereRotaryEmbedding(_cohere_config())(hidden, torch.arange(7)[None])
    return (hidden,), {"position_embeddings": rotary, "attention_mask": causal(7, dtype)}


DELTA = """import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(12, 8)
        self.beta, self.alpha = nn.Linear(12, 2), nn.Linear(12, 2)
        self.conv = nn.Parameter(torch.randn(8, 1, 3))
        self.out = nn.Linear(8, 12)

    def short(self, x):
        y = F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), self.conv, groups=8)
        return F.silu(y.transpose(1, 2))

    def forward(self, x):
        q = F.normalize(self.short(self.q(x)).unflatten(-1, (2, 4)), dim=-1)
        k = F.normalize(self.short(self.k(x)).unflatten(-1, (2, 4)), dim=-1)
        v = self.v(x).unflatten(-1, (2, 4))
        beta = torch.sigmoid(self.beta(x))
        decay = torch.exp(-F.softplus(self.alpha(x)))
        state = x.new_zeros(x.shape[0], 2, 4, 4)
        outputs = []
        for t in range(x.shape[1]):
            state = state * decay[:, t, :, None, None]
            seen = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            change = (v[:, t] - seen) * beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * change[:, :, None, :]
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        y = torch.stack(outputs, 1)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.out(y.flatten(2))
"""

LATENT = """import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(16, 6 + 4)
        self.up = nn.Linear(6, 2 * (8 + 8))
        self.q = nn.Linear(16, 2 * (8 + 4))
        self.sink = nn.Parameter(torch.randn(2))
        self.out = nn.Linear(16, 16)

    def turn(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def forward(self, x):
        latent, shared = self.down(x).split([6, 4], -1)
        latent = F.rms_norm(latent, (6,))
        k, v = self.up(latent).unflatten(-1, (2, 16)).transpose(1, 2).split([8, 8], -1)
        q, q_turn = self.q(x).unflatten(-1, (2, 12)).transpose(1, 2).split([8, 4], -1)
        shared = self.turn(shared[:, None])
        scores = q @ k.mT + self.turn(q_turn) @ shared.mT
        scores = scores / 12**0.5
        places = torch.arange(x.shape[1])
        far = (places[:, None] - places[None, :]).abs() > 3
        scores = scores.masked_fill(far | (places[None, :] > places[:, None]), float("-inf"))
        sink = self.sink[:, None, None].expand(x.shape[0], -1, x.shape[1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        y = (weights @ v).transpose(1, 2).flatten(2)
        return self.out(y) + x
"""

DETECTION = """import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.boxes = nn.Linear(10, 4)
        self.classes = nn.Linear(10, 5)
        self.ema = nn.Buffer(torch.full((5,), 0.2))

    def corners(self, box):
        center, size = box[..., :2], box[..., 2:].exp()
        return center - size / 2, center + size / 2

    def overlap(self, one, two):
        low, high = self.corners(one)
        other_low, other_high = self.corners(two)
        inner = (torch.minimum(high, other_high) - torch.maximum(low, other_low)).clamp(min=0).prod(-1)
        both = (high - low).prod(-1) + (other_high - other_low).prod(-1) - inner
        outer = (torch.maximum(high, other_high) - torch.minimum(low, other_low)).prod(-1)
        return inner / both - (outer - both) / outer

    def forward(self, x):
        boxes, logits = self.boxes(x), self.classes(x)
        prior = torch.log(self.ema)
        p = torch.sigmoid(logits + prior)
        target = F.one_hot(x.argmax(-1) % 5, 5).to(x)
        focal = -(target * (1 - p) ** 2 * torch.log(p) + (1 - target) * p**2 * torch.log1p(-p))
        giou = self.overlap(boxes, x[..., :4])
        smooth = torch.where(boxes.abs() < 1, 0.5 * boxes**2, boxes.abs() - 0.5)
        quality = target * giou.detach()[..., None].clamp(min=0)
        ranked = (p - quality).abs().cumsum(-1)
        return focal.sum(-1).mean() + (1 - giou).mean() + 0.1 * smooth.mean() + 0.01 * ranked.mean()
"""

FLOW = """import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mix = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.time = nn.Linear(6, 8)
        self.adapt = nn.Linear(8, 24)

    def embed(self, t):
        rates = torch.exp(-torch.arange(3) * 1.5)
        phases = t[:, None] * rates
        return torch.cat([phases.sin(), phases.cos()], -1)

    def forward(self, x):
        t = torch.linspace(0.1, 0.9, x.shape[0])
        shift, scale, gate = self.adapt(F.silu(self.time(self.embed(t)))).chunk(3, -1)
        h = F.layer_norm(x, (8,)) * (1 + scale[:, None]) + shift[:, None]
        a, b = h.chunk(2, -1)
        log_scale = torch.tanh(self.scale(a))
        b = b * log_scale.exp() + self.shift(a)
        h = torch.cat([b, a], -1)
        matrix = torch.linalg.matrix_exp(self.mix - self.mix.T)
        h = h @ matrix
        log_density = -0.5 * h.square().sum(-1) + log_scale.sum(-1)
        noisy = t[:, None, None] * x + (1 - t[:, None, None]) * torch.roll(x, 1, 0)
        velocity = x - torch.roll(x, 1, 0)
        loss = (gate[:, None] * h + noisy - velocity).square().mean((1, 2))
        weight = 1 / (1 - t).clamp(min=0.2)
        return (weight * loss).mean() - 0.1 * log_density.mean()
"""

SOURCES: dict[str, Source] = {
    "deepseek_v3": Source(
        library_text("deepseek_v3"), _deepseek, lambda module, dtype: ((randn(2, 6, 16).to(dtype),), {})
    ),
    "cohere": Source(
        library_text("cohere"),
        lambda module, dtype: randomised(module.CohereDecoderLayer(_cohere_config(), 0), dtype),
        _cohere_inputs,
    ),
    "delta": own_source(DELTA, 2, 5, 12),
    "latent": own_source(LATENT, 2, 6, 16),
    "detection": own_source(DETECTION, 3, 4, 10),
    "flow": own_source(FLOW, 3, 5, 8),
}

_UNFUSED_COHERE_MLP = {
    "self.act_fn(self.gate_proj(x)) * self.up_proj(x)": "self.up_proj(x) * self.act_fn(self.gate_proj(x)).clone()"
}
_UNFUSED_RMS = {
    "latent = F.rms_norm(latent, (6,))": "latent = latent * (latent.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt()"
}
_ADDED = {"v = self.v(x).unflatten(-1, (2, 4))": "v = (self.v(x) + 0.0).unflatten(-1, (2, 4))"}
_LOG_SIGMOID = {"torch.log(p) +": "F.logsigmoid(logits + prior) +"}

MISTAKES: tuple[Mistake, ...] = (
    Mistake("softmax router", "deepseek_v3", "scores = router_logits.sigmoid()", "scores = router_logits.softmax(-1)"),
    Mistake(
        "weights with the bias",
        "deepseek_v3",
        "topk_weights = scores.gather(1, topk_indices)",
        "topk_weights = scores_for_choice.gather(1, topk_indices)",
    ),
    Mistake("groups by one score", "deepseek_v3", ".topk(2, dim=-1)[0]", ".topk(1, dim=-1)[0]"),
    Mistake(
        "routed scale lost",
        "deepseek_v3",
        "topk_weights = topk_weights * self.routed_scaling_factor",
        "topk_weights = topk_weights * 1.0",
    ),
    Mistake(
        "shared experts on the sum",
        "deepseek_v3",
        "hidden_states + self.shared_experts(residuals)",
        "hidden_states + self.shared_experts(hidden_states)",
    ),
    Mistake(
        "router detached",
        "deepseek_v3",
        "topk_weights = scores.gather(1, topk_indices)",
        "topk_weights = scores.detach().gather(1, topk_indices)",
    ),
    Mistake(
        "halves for pairs",
        "cohere",
        "rot_x = torch.stack([-x2, x1], dim=-1).flatten(-2)",
        "rot_x = torch.cat([-x2, x1], dim=-1)",
    ),
    Mistake(
        "rotation the other way",
        "cohere",
        "torch.stack([-x2, x1], dim=-1)",
        "torch.stack([x2, -x1], dim=-1)",
        more=_UNFUSED_COHERE_MLP,
    ),
    Mistake(
        "norm keeps its mean",
        "cohere",
        "variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)",
        "variance = hidden_states.pow(2).mean(-1, keepdim=True)",
    ),
    Mistake("keys not normalised", "cohere", "key_states = self.k_norm(key_states)", "pass", or_reference=True),
    Mistake(
        "perceptron after attention",
        "cohere",
        "hidden_states_mlp = self.mlp(hidden_states)",
        "hidden_states_mlp = self.mlp(hidden_states + hidden_states_attention)",
    ),
    Mistake("rotary not upcast", "cohere", "    k = k.float()\n", "    k = k\n", torch.bfloat16, or_reference=True),
    Mistake(
        "decay after the read",
        "delta",
        "decay = torch.exp(-F.softplus(self.alpha(x)))",
        "decay = torch.exp(F.softplus(self.alpha(x)) * -0.9)",
        more=_ADDED,
    ),
    Mistake("nothing subtracted", "delta", "(v[:, t] - seen) * beta[:, t, :, None]", "v[:, t] * beta[:, t, :, None]"),
    Mistake("convolution sees the future", "delta", "(2, 0))", "(1, 1))"),
    Mistake(
        "query without normalisation",
        "delta",
        "q = F.normalize(self.short(self.q(x)).unflatten(-1, (2, 4)), dim=-1)",
        "q = self.short(self.q(x)).unflatten(-1, (2, 4))",
    ),
    Mistake(
        "state not carried",
        "delta",
        "state = state + k[:, t, :, :, None]",
        "state = state.detach() + k[:, t, :, :, None]",
    ),
    Mistake("window one too wide", "latent", ".abs() > 3", ".abs() > 4", more=_UNFUSED_RMS),
    Mistake(
        "sink dropped before the softmax",
        "latent",
        "torch.cat([scores, sink], -1).softmax(-1)[..., :-1]",
        "scores.softmax(-1)",
    ),
    Mistake("scale of one part", "latent", "scores = scores / 12**0.5", "scores = scores / 8**0.5", more=_UNFUSED_RMS),
    Mistake("shared key not turned", "latent", "shared = self.turn(shared[:, None])", "shared = shared[:, None]"),
    Mistake(
        "frequencies", "latent", "100.0 ** (-torch.arange(half) / half)", "100.0 ** (-torch.arange(half) / x.shape[-1])"
    ),
    Mistake("keys and values swapped", "latent", "k, v = self.up(latent)", "v, k = self.up(latent)"),
    Mistake(
        "outer box by the inner",
        "detection",
        "outer = (torch.maximum(high, other_high) - torch.minimum(low, other_low)).prod(-1)",
        "outer = (torch.maximum(high, other_high) - torch.maximum(low, other_low)).prod(-1)",
    ),
    Mistake("overlap not clamped", "detection", ".clamp(min=0).prod(-1)", ".prod(-1)"),
    Mistake("focus on the easy", "detection", "(1 - p) ** 2 * torch.log(p)", "p**2 * torch.log(p)"),
    Mistake(
        "prior not added", "detection", "torch.sigmoid(logits + prior)", "torch.sigmoid(logits)", more=_LOG_SIGMOID
    ),
    Mistake("quality with a gradient", "detection", "giou.detach()[..., None]", "giou[..., None]"),
    Mistake("smooth without its offset", "detection", "boxes.abs() - 0.5)", "boxes.abs())"),
    Mistake("gate and scale swapped", "flow", "shift, scale, gate = self.adapt", "shift, gate, scale = self.adapt"),
    Mistake("coupling of the wrong half", "flow", "h = torch.cat([b, a], -1)", "h = torch.cat([a, b], -1)"),
    Mistake("not antisymmetric", "flow", "self.mix - self.mix.T", "self.mix"),
    Mistake(
        "density without the volume",
        "flow",
        "-0.5 * h.square().sum(-1) + log_scale.sum(-1)",
        "-0.5 * h.square().sum(-1)",
    ),
    Mistake("velocity reversed", "flow", "velocity = x - torch.roll(x, 1, 0)", "velocity = torch.roll(x, 1, 0) - x"),
)

RIGHT: dict[str, tuple[str, Mapping[str, str]]] = {
    "router by a matrix product": (
        "deepseek_v3",
        {
            "F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))": "hidden_states.float() @ self.weight.float().t()"
        },
    ),
    "weights divided anew": (
        "deepseek_v3",
        {"topk_weights /= denominator": "topk_weights = torch.div(topk_weights, denominator)"},
    ),
    "variance of torch": (
        "cohere",
        {
            "variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)": "variance = hidden_states.var(-1, keepdim=True, unbiased=False)"
        },
    ),
    "rotation by repeated parts": (
        "cohere",
        {
            "rot_x = torch.stack([-x2, x1], dim=-1).flatten(-2)": "rot_x = torch.empty_like(x); rot_x[..., ::2] = -x2; rot_x[..., 1::2] = x1"
        },
    ),
    "products for einsum": (
        "delta",
        {'seen = torch.einsum("bhkv,bhk->bhv", state, k[:, t])': "seen = (k[:, t, :, None, :] @ state)[:, :, 0]"},
    ),
    "rms norm written out": ("latent", _UNFUSED_RMS),
    "scores joined first": (
        "latent",
        {
            "scores = q @ k.mT + self.turn(q_turn) @ shared.mT": "scores = torch.cat([q, self.turn(q_turn)], -1) @ torch.cat([k, shared.expand(-1, 2, -1, -1)], -1).mT"
        },
    ),
    "log of a sigmoid": ("detection", _LOG_SIGMOID),
    "smooth loss of torch": (
        "detection",
        {
            "smooth = torch.where(boxes.abs() < 1, 0.5 * boxes**2, boxes.abs() - 0.5)": "smooth = F.smooth_l1_loss(boxes, torch.zeros_like(boxes), reduction='none')"
        },
    ),
    "addcmul and chunks by view": (
        "flow",
        {
            "F.layer_norm(x, (8,)) * (1 + scale[:, None]) + shift[:, None]": "torch.addcmul(shift[:, None], F.layer_norm(x, (8,)), 1 + scale[:, None])"
        },
    ),
}
"""Other ways to write the same, by name: the source and its replacements."""

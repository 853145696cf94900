"""A plain Llama, in a size for a GPU and one for a CPU."""
# mypy: allow-subclassing-any, allow-untyped-calls
# (torch's types change with its version, so they are not followed: nn.Module is Any here.)

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from tensortap.errors import UsageError

__all__ = ["SIZES", "Llama", "ModelSize", "size_of"]


@dataclass(frozen=True)
class ModelSize:
    """The dimensions of a model and of its batch."""

    layers: int
    width: int
    inner: int
    heads: int
    words: int
    batch: int
    length: int
    dtype: str


SIZES = {
    "llama-0.95b": ModelSize(16, 2048, 5632, 16, 32_000, 4, 2048, "bfloat16"),
    "llama-small": ModelSize(4, 256, 704, 4, 2000, 8, 128, "float32"),
    "llama-tiny": ModelSize(2, 32, 88, 2, 64, 2, 16, "float32"),
}


def size_of(name: str | None, device: str) -> tuple[str, ModelSize]:
    """Return the size of a name, or the default of the device."""
    name = name or ("llama-0.95b" if device == "cuda" else "llama-small")
    if name not in SIZES:
        raise UsageError(f"model: {name!r} is not one of {', '.join(SIZES)}")
    return name, SIZES[name]


class LlamaNorm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class LlamaRotary(nn.Module):
    """Rotary position embedding: cosines and sines of the angles by position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rates = 10_000.0 ** (-torch.arange(0, self.width, 2, device=x.device) / self.width)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * rates
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            left, right = y.chunk(2, -1)
            return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

        q, k, v = rotate(split(self.q_proj(x))), rotate(split(self.k_proj(x))), split(self.v_proj(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class LlamaMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.act_fn = nn.SiLU()
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.input_layernorm = LlamaNorm(size.width)
        self.self_attn = LlamaAttention(size.width, size.heads)
        self.post_attention_layernorm = LlamaNorm(size.width)
        self.mlp = LlamaMLP(size.width, size.inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A decoder that predicts the next token; embedding and head have separate weights."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.words, size.width)
        self.rotary_emb = LlamaRotary(size.width // size.heads)
        self.layers = nn.ModuleList(LlamaLayer(size) for _ in range(size.layers))
        self.norm = LlamaNorm(size.width)
        self.lm_head = nn.Linear(size.width, size.words, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))

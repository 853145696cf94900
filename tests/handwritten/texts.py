"""Language models: learned positions, rotary positions with padding, ALiBi, experts, encoder and decoder, a perceiver."""

# ruff: noqa: E501 - code and its other version are easier to compare in one line each

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from field.kit.data import Batch
from field.kit.patches import both, holds, reads, trains

from .functions import (
    attention_by_einsum,
    attention_by_hand,
    cross_entropy_by_hand,
    cross_entropy_in_chunks,
    gelu_by_hand,
    norm_by_hand,
    rms_norm,
)
from .kinds import Handwritten, in_every

WORDS, LENGTH, ROWS, WIDTH, HEADS = 50, 10, 4, 24, 3


def tokens(random: torch.Generator) -> Batch:
    text = torch.randint(1, WORDS, (ROWS, LENGTH + 1), generator=random)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), CausalAttention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Learned positions, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


_SDPA = "F.scaled_dot_product_attention"
_BY_HAND = in_every("CausalAttention", _SDPA, "by_hand", by_hand=attention_by_hand)

GPT = Handwritten(
    Gpt, tokens, next_token, splits=True, checkpoints=("blocks.0", "blocks.1"),
    rewrites={
        "attention by hand": _BY_HAND,
        "attention by einsum": in_every("CausalAttention", _SDPA, "by_hand", by_hand=attention_by_einsum),
        "gelu by hand": in_every("Block", "F.gelu", "by_hand", by_hand=gelu_by_hand),
        "loss by hand": trains(
            loss=lambda model, batch: cross_entropy_by_hand(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        ),
        "loss in chunks": trains(
            loss=lambda model, batch: cross_entropy_in_chunks(
                model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
            )
        ),
        "in place": in_every("Block", "x = x + self.attn(self.norm1(x))", "x = self.attn(self.norm1(x)).add_(x)"),
    },
    mistakes=(
        ("not causal", "blocks.1.attn", (", is_causal=True", "")),
        ("heads not transposed", "blocks.0.attn", ("y.transpose(1, 2).reshape", "y.reshape")),
        ("keys and values swapped", "blocks.0.attn", ("q, k, v = self", "q, v, k = self")),
        ("residual lost", "blocks.1", ("return x + self.down", "return self.down")),
        ("positions from one", "", ("self.positions[: tokens.shape[1]]", "self.positions.roll(1, 0)")),
        ("norm epsilon", "blocks.0.norm2", {"eps": 1e-3}),
        ("labels not shifted", "", trains(loss=lambda model, batch: F.cross_entropy(
            model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten())), "backward"),
    ),
)  # fmt: skip


# --- rotary positions, grouped heads, padding ------------------------------------------------------------------------


def padded(random: torch.Generator) -> Batch:
    """Texts of several lengths, padded on the right."""
    text = torch.randint(1, WORDS, (ROWS, LENGTH), generator=random)
    seen = torch.arange(LENGTH) < torch.tensor([LENGTH, 7, LENGTH - 1, 5])[:, None]
    labels = torch.cat([text[:, 1:], torch.zeros(ROWS, 1, dtype=torch.long)], 1)
    known = torch.cat([seen[:, 1:], torch.zeros(ROWS, 1, dtype=torch.bool)], 1)
    return {"tokens": text * seen, "seen": seen, "labels": labels.masked_fill(~known, -100)}


def _padded_left(batch: Batch) -> Batch:
    shifts = LENGTH - batch["seen"].sum(1)
    return {
        name: torch.stack([row.roll(int(by)) for row, by in zip(value, shifts, strict=True)])
        for name, value in batch.items()
    }


def _next_of_padded(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"], batch["seen"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def _reads_padding(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"], batch["seen"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["tokens"][:, 1:].flatten())


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    length, size = x.shape[-2:]
    angles = torch.arange(length)[:, None] * base ** -(torch.arange(0, size, 2) / size)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., 0::2], x[..., 1::2]
    return torch.stack([left * cos - right * sin, left * sin + right * cos], -1).flatten(-2)


def rotate_by_complex(x: Tensor, base: float = 10000.0) -> Tensor:
    length, size = x.shape[-2:]
    angles = torch.arange(length)[:, None] * base ** -(torch.arange(0, size, 2) / size)
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class RotaryAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)
        self.out = nn.Linear(32, WIDTH, bias=False)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(rows, length, 2, 2, 8).permute(2, 0, 3, 1, 4)
        q, k = rotate(q), rotate(k)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mask = seen[:, None, None, :] & torch.ones(length, length, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 40, bias=False), nn.Linear(WIDTH, 40, bias=False)
        self.down = nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class RotaryBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = RmsNorm(), RotaryAttention(), RmsNorm(), GatedMlp()

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), seen)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(RotaryBlock() for _ in range(2))
        self.norm, self.head = RmsNorm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, seen)
        return self.head(self.norm(x))


def _padded_vocabulary(training: Any) -> None:
    """The head has further words that no text has, and the loss leaves them out."""
    head = training.model.head
    head.weight = nn.Parameter(torch.cat([head.weight.detach(), torch.zeros(14, WIDTH)]))
    training.loss = lambda model, batch: F.cross_entropy(
        model(batch["tokens"], batch["seen"])[..., :WORDS].flatten(0, 1).float(), batch["labels"].flatten()
    )


ROTARY = Handwritten(
    Decoder, padded, _next_of_padded, checkpoints=("blocks.1",),
    rewrites={
        "attention by hand": in_every("RotaryAttention", _SDPA, "by_hand", by_hand=attention_by_hand),
        "additive mask": in_every(
            "RotaryAttention", "attn_mask=mask", "attn_mask=torch.where(mask, 0.0, torch.finfo(q.dtype).min).to(q.dtype)"
        ),
        "attention by einsum": in_every("RotaryAttention", _SDPA, "by_hand", by_hand=attention_by_einsum),
        "rotary by complex numbers": in_every("RotaryAttention", "rotate(q), rotate(k)", "turn(q), turn(k)", turn=rotate_by_complex),
        "torch's norm": in_every("RmsNorm", "rms_norm(x, self.weight, self.eps)", "F.rms_norm(x, (WIDTH,), self.weight, self.eps)"),
        "gate and up in one": in_every(
            "GatedMlp", "F.silu(self.gate(x)) * self.up(x)",
            "(lambda both: F.silu(both[0]) * both[1])(F.linear(x, torch.cat([self.gate.weight, self.up.weight])).chunk(2, -1))",
        ),
    },
    commons={
        "padded left": reads(_padded_left),
        "padded vocabulary": _padded_vocabulary,
        "reads padding": trains(loss=_reads_padding),
        "padded left, reads padding": both(reads(_padded_left), trains(loss=_reads_padding)),
    },
    mistakes=(
        ("base of the rotation", "blocks.0.attn", ("rotate(q), rotate(k)", "rotate(q, 500.0), rotate(k, 500.0)")),
        ("mask off by one", "blocks.1.attn", ("dtype=torch.bool).tril()", "dtype=torch.bool).tril(1)")),
        ("key heads tiled", "blocks.0.attn", ("k.repeat_interleave(2, 1), v.repeat_interleave", "k.repeat(1, 2, 1, 1), v.repeat_interleave")),
        ("gate and up swapped", "blocks.1.mlp", ("F.silu(self.gate(x)) * self.up(x)", "F.silu(self.up(x)) * self.gate(x)")),
        ("key not rotated", "blocks.1.attn", ("rotate(q), rotate(k)", "rotate(q), k")),
        ("norm epsilon", "blocks.1.norm1", {"eps": 1e-2}),
        ("value detached", "blocks.0.attn", ("k, v = k.rep", "v = v.detach(); k, v = k.rep"), "backward"),
    ),
)  # fmt: skip


# --- ALiBi -----------------------------------------------------------------------------------------------------------


class AlibiLayer(nn.Module):
    """An encoder's layer with norms after the residual; nearer tokens weigh more."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1])
        bias = -self.slopes[:, None, None] * (places[:, None] - places).abs()
        bias = bias.masked_fill(~seen[:, None, None, :], float("-inf")).to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = self.norm1(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.fc2(F.relu(self.fc1(x))))


class AlibiEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers, self.head = nn.ModuleList(AlibiLayer() for _ in range(3)), nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, seen)
        weight = seen.to(x.dtype)[..., None]
        return self.head((x * weight).sum(1) / weight.sum(1))


def _classified(random: torch.Generator) -> Batch:
    return padded(random) | {"labels": torch.randint(5, (ROWS,), generator=random)}


ALIBI = Handwritten(
    AlibiEncoder, _classified,
    lambda model, batch: F.cross_entropy(model(batch["tokens"], batch["seen"]).float(), batch["labels"]),
    held_out=True, splits=True, checkpoints=("layers.1",),
    rewrites={
        "attention by hand": in_every("AlibiLayer", _SDPA, "by_hand", by_hand=attention_by_hand),
        "attention by einsum": in_every("AlibiLayer", _SDPA, "by_hand", by_hand=attention_by_einsum),
        "in place": in_every("AlibiLayer", "F.relu(self.fc1(x))", "self.fc1(x).relu_()"),
    },
    commons={"padded left": reads(lambda batch: _padded_left({k: v for k, v in batch.items() if v.ndim > 1}) | {"labels": batch["labels"]})},
    mistakes=(
        ("slopes of another head", "layers.1", ("-self.slopes[:, None, None]", "-self.slopes.flip(0)[:, None, None]")),
        ("mean over padding", "", ("(x * weight).sum(1) / weight.sum(1)", "x.mean(1)")),
        ("second norm lost", "layers.2", ("self.norm2(x + self.fc2(F.relu(self.fc1(x))))", "x + self.fc2(F.relu(self.fc1(x)))")),
        ("bias of the future alone", "layers.0", ("(places[:, None] - places).abs()", "(places[:, None] - places).clamp(min=0)")),
    ),
)  # fmt: skip


# --- experts ---------------------------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    """The two best of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).float().softmax(-1).topk(2)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, token, (weights[token, place, None] * expert(flat[token])).to(y.dtype))
        return y.view_as(x)


class ExpertBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        del self.up, self.down
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.experts(self.norm2(x))


class MixtureOfExperts(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(2))


def _all_experts(self: Any, x: Tensor) -> Tensor:
    """Every expert computes every token; what was not chosen has no weight."""
    flat = x.flatten(0, 1)
    weights, chosen = self.router(flat).float().softmax(-1).topk(2)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
    full = torch.zeros(len(flat), 4, dtype=x.dtype).scatter(1, chosen, weights)
    return torch.stack([full[:, n, None] * expert(flat) for n, expert in enumerate(self.experts)]).sum(0).view_as(x)


def _everywhere(training: Any) -> None:
    for module in training.model.modules():
        if isinstance(module, Experts):
            module.forward = functools.partial(_all_experts, module)


MOE = Handwritten(
    MixtureOfExperts, tokens, next_token, checkpoints=("blocks.0",),
    rewrites={"attention by hand": _BY_HAND, "every expert on every token": _everywhere},
    mistakes=(
        ("weights not normed", "blocks.1.experts", ("(weights / weights.sum(-1, keepdim=True))", "weights")),
        ("best alone", "blocks.0.experts", (".softmax(-1).topk(2)", ".softmax(-1).topk(1)")),
        ("last expert skipped", "blocks.0.experts", ("enumerate(self.experts)", "enumerate(self.experts[:3])")),
        ("router not trained", "blocks.1.experts.router", lambda training: training.model.blocks[1].experts.router.weight.requires_grad_(False), "backward"),
        ("expert badly loaded", "blocks.0.experts.experts.2.up", holds("blocks.0.experts.experts.2.up", "weight", lambda w: w * 1.1), "state"),
    ),
)  # fmt: skip


# --- encoder and decoder, and a perceiver ----------------------------------------------------------------------------


class Translator(nn.Module):
    """torch's own Transformer, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        y = self.transformer(
            self.embed(source) * math.sqrt(WIDTH), self.embed(target) * math.sqrt(WIDTH),
            tgt_mask=causal, src_key_padding_mask=hidden, memory_key_padding_mask=hidden,
        )  # fmt: skip
        return self.head(y)


def _translated(random: torch.Generator) -> Batch:
    batch, target = padded(random), tokens(random)
    return {"source": batch["tokens"], "hidden": ~batch["seen"], "target": target["tokens"], "labels": target["labels"]}


def _translation_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["source"], batch["hidden"], batch["target"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), label_smoothing=0.1)


def _slow_attention(training: Any) -> None:
    """Attention that also computes its weights takes the way by hand."""
    for module in training.model.modules():
        if isinstance(module, nn.MultiheadAttention):
            inner = type(module).forward.__get__(module)

            def forward(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
                return inner(*args, **(kwargs | {"need_weights": True, "is_causal": False}))

            module.forward = forward


def _smoothed_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    logs = model(batch["source"], batch["hidden"], batch["target"]).flatten(0, 1).float().log_softmax(-1)
    picked = logs.gather(1, batch["labels"].flatten()[:, None]).mean()
    return -(0.9 * picked + 0.1 * logs.mean())


TRANSFORMER = Handwritten(
    Translator, _translated, _translation_loss, held_out=True, splits=True,
    rewrites={"attention by hand": _slow_attention, "loss by hand": trains(loss=_smoothed_by_hand)},
    mistakes=(
        ("embedding not scaled", "", ("self.embed(source) * math.sqrt(WIDTH), ", "self.embed(source), ")),
        ("padding of the memory seen", "", ("memory_key_padding_mask=hidden", "memory_key_padding_mask=None")),
        ("not causal", "", ("tgt_mask=causal, ", "")),
        ("no smoothing", "", trains(loss=lambda m, b: F.cross_entropy(m(b["source"], b["hidden"], b["target"]).flatten(0, 1), b["labels"].flatten())), "backward"),
    ),
)  # fmt: skip


class CrossAttention(nn.Module):
    def __init__(self, given: int) -> None:
        super().__init__()
        self.norm, self.norm_given = nn.LayerNorm(WIDTH), nn.LayerNorm(given)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(given, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        q = self.q(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(self.norm_given(given)).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Perceiver(nn.Module):
    """Few latent vectors read a long input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, WIDTH))
        self.read, self.think, self.again = CrossAttention(6), CrossAttention(WIDTH), CrossAttention(6)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, given: Tensor) -> Tensor:
        x = self.latents.expand(len(given), -1, -1)
        x = self.read(x, given)
        x = self.think(x, x)
        x = self.again(x, given)
        return self.head(x.mean(1))


PERCEIVER = Handwritten(
    Perceiver,
    lambda random: {"given": torch.randn(ROWS, 40, 6, generator=random), "labels": torch.randint(4, (ROWS,), generator=random)},
    lambda model, batch: F.cross_entropy(model(batch["given"]).float(), batch["labels"]),
    held_out=True, splits=True, checkpoints=("think",),
    rewrites={
        "attention by hand": in_every("CrossAttention", _SDPA, "by_hand", by_hand=attention_by_hand),
        "attention by einsum": in_every("CrossAttention", _SDPA, "by_hand", by_hand=attention_by_einsum),
        "norms by hand": in_every(
            "CrossAttention", "self.q(self.norm(x))", "self.q(norm(x, None, self.norm.weight, self.norm.bias))", norm=norm_by_hand
        ),
    },
    mistakes=(
        ("wrong normalised axis", "again", ("self.out(y.transpose(1, 2).flatten(2))", "self.out(y.flatten(1, 2).unflatten(1, (-1, HEADS)).flatten(2))")),
        ("residual of the normed", "think", ("return x + self.out", "return self.norm(x) + self.out")),
        ("features in another order", "", ("x = self.again(x, given)", "x = self.again(x, given.roll(1, 2))")),
        ("latents detached", "", ("self.latents.expand", "self.latents.detach().expand"), "backward"),
    ),
)  # fmt: skip

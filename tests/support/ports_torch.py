"""Parts of well-known models in torch, with the names and the nesting that transformers gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

F = nn.functional


class Conv1D(nn.Module):
    """As in transformers: a Linear whose weight is [in, out]."""

    def __init__(self, outer: int, inner: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inner, outer) / inner**0.5), nn.Parameter(torch.randn(outer))

    def forward(self, x: Any) -> Any:
        return x @ self.weight + self.bias


class GPT2Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.attn_dropout = Conv1D(3 * width, width), Conv1D(width, width), nn.Dropout(0.0)

    def forward(self, x: Any) -> Any:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        scores = scores + torch.full(scores.shape[-2:], -1e9).triu(1)
        return self.c_proj((self.attn_dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))


class GPT2MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.act = Conv1D(4 * width, width), Conv1D(width, 4 * width), nn.GELU("tanh")

    def forward(self, x: Any) -> Any:
        return self.c_proj(self.act(self.c_fc(x)))


class GPT2Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), GPT2Attention(width)
        self.ln_2, self.mlp = nn.LayerNorm(width), GPT2MLP(width)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, width), nn.Embedding(9, width)
        self.h, self.ln_f = nn.ModuleList([GPT2Block(width) for _ in range(2)]), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 20, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])[None])
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class PredictionTransform(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense, self.transform_act_fn = nn.Linear(width, width), nn.GELU()
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Any) -> Any:
        return self.LayerNorm(self.transform_act_fn(self.dense(x)))


class Predictions(nn.Module):
    """The head of BertForMaskedLM: the decoder's weight is the embedding's, and its bias is the head's own."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        count, width = words.weight.shape
        self.transform, self.decoder = PredictionTransform(width), nn.Linear(width, count)
        self.decoder.weight = words.weight
        self.bias = nn.Parameter(torch.randn(count))
        self.decoder.bias = self.bias

    def forward(self, x: Any) -> Any:
        return self.decoder(self.transform(x))


class Head(nn.Module):
    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.predictions = Predictions(words)

    def forward(self, x: Any) -> Any:
        return self.predictions(x)


class Bert(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.word_embeddings, self.LayerNorm = nn.Embedding(20, width), nn.LayerNorm(width, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(9)[None], persistent=False)

    def forward(self, tokens: Any) -> Any:
        return self.LayerNorm(self.word_embeddings(tokens))


class BertForMaskedLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = Bert()
        self.cls = Head(self.bert.word_embeddings)

    def forward(self, tokens: Any) -> Any:
        return self.cls(self.bert(tokens))


class ChannelsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Any) -> Any:
        return F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],), self.weight, self.bias, 1e-6).permute(0, 3, 1, 2)


class ConvNextLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv, self.layernorm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.layer_scale_parameter = nn.Parameter(torch.randn(width))

    def forward(self, x: Any) -> Any:
        y = self.layernorm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.layer_scale_parameter * self.pwconv2(self.act(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNextStage(nn.Module):
    """Downsamples, then works."""

    def __init__(self, inner: int, width: int, depth: int) -> None:
        super().__init__()
        self.downsampling_layer = nn.ModuleList()
        if inner != width:
            self.downsampling_layer = nn.ModuleList([ChannelsNorm(inner), nn.Conv2d(inner, width, 2, 2)])
        self.layers = nn.ModuleList([ConvNextLayer(width) for _ in range(depth)])

    def forward(self, x: Any) -> Any:
        for layer in (*self.downsampling_layer, *self.layers):
            x = layer(x)
        return x


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Sequential(nn.Conv2d(3, 4, 2, 2), ChannelsNorm(4))
        self.stages = nn.ModuleList([ConvNextStage(4, 4, 1), ConvNextStage(4, 6, 2), ConvNextStage(6, 8, 1)])
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        x = self.embeddings(x)
        for stage in self.stages:
            x = stage(x)
        return self.classifier(x.mean((2, 3)))


class PositionBias(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.randn(7, heads))

    def forward(self) -> Any:
        return self.relative_position_bias_table[(torch.arange(4)[:, None] - torch.arange(4)) + 3].permute(2, 0, 1)


class SwinAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.relative_position_bias = PositionBias(2)

    def forward(self, x: Any) -> Any:
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + self.relative_position_bias()
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class SwinStage(nn.Module):
    def __init__(self, width: int, merge: bool) -> None:
        super().__init__()
        self.layernorm_before, self.attention = nn.LayerNorm(width), SwinAttention(width)
        self.downsample = nn.ModuleDict()
        if merge:
            self.downsample["reduction"] = nn.Linear(2 * width, width, bias=False)
            self.downsample["norm"] = nn.LayerNorm(2 * width)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.layernorm_before(x))
        if not self.downsample:
            return x
        merged = torch.cat([x[:, 0::2], x[:, 1::2]], -1).repeat_interleave(2, 1)  # as long as before
        return self.downsample["reduction"](self.downsample["norm"](merged))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SwinStage(8, True), SwinStage(8, False)])
        self.layernorm = nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.layernorm(x)

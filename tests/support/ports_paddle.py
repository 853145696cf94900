"""The same in paddle, as PaddleNLP and PaddleClas name and nest them."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

F = nn.functional


class GPTAttention(nn.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Any) -> Any:
        q, k, v = (
            p(x).reshape([x.shape[0], x.shape[1], 2, -1]).transpose([0, 2, 1, 3])
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = paddle.matmul(q, k, transpose_y=True) / q.shape[-1] ** 0.5
        scores = scores + paddle.triu(paddle.full(scores.shape[-2:], -1e9), 1)
        return self.out_proj(paddle.matmul(F.softmax(scores, -1), v).transpose([0, 2, 1, 3]).flatten(2))


class GPTLayer(nn.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self_attn = GPTAttention(width)
        self.linear1, self.linear2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(self.norm1(x))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x)), approximate=True))


class GPTEmbeddings(nn.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(20, width), nn.Embedding(9, width)

    def forward(self, tokens: Any) -> Any:
        positions = paddle.arange(tokens.shape[1]).unsqueeze(0).expand(tokens.shape)
        return self.word_embeddings(tokens) + self.position_embeddings(positions)


class GPT2(nn.Layer):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embeddings = GPTEmbeddings(width)
        self.decoder = nn.LayerList([GPTLayer(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Any) -> Any:
        x = self.embeddings(tokens)
        for layer in self.decoder:
            x = layer(x)
        return paddle.matmul(self.norm(x), self.embeddings.word_embeddings.weight, transpose_y=True)


class Head(nn.Layer):
    """A level less than transformers has, and the decoder's tensors are the head's own."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        count, width = words.weight.shape
        self.transform, self.layer_norm = nn.Linear(width, width), nn.LayerNorm(width, epsilon=1e-12)
        self.decoder_weight = words.weight
        self.decoder_bias = self.create_parameter([count], is_bias=True)

    def forward(self, x: Any) -> Any:
        x = self.layer_norm(F.gelu(self.transform(x)))
        return paddle.matmul(x, self.decoder_weight, transpose_y=True) + self.decoder_bias


class Bert(nn.Layer):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.word_embeddings, self.layer_norm = nn.Embedding(20, width), nn.LayerNorm(width, epsilon=1e-12)

    def forward(self, tokens: Any) -> Any:
        return self.layer_norm(self.word_embeddings(tokens))


class BertForMaskedLM(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.bert = Bert()
        self.cls = Head(self.bert.word_embeddings)

    def forward(self, tokens: Any) -> Any:
        return self.cls(self.bert(tokens))


class ChannelsFirstNorm(nn.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = self.create_parameter([width]), self.create_parameter([width], is_bias=True)

    def forward(self, x: Any) -> Any:
        y = F.layer_norm(x.transpose([0, 2, 3, 1]), x.shape[1], self.weight, self.bias, 1e-6)
        return y.transpose([0, 3, 1, 2])


class Block(nn.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2D(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width, epsilon=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.gamma = self.create_parameter([width])

    def forward(self, x: Any) -> Any:
        y = self.norm(self.dwconv(x).transpose([0, 2, 3, 1]))
        return x + (self.gamma * self.pwconv2(self.act(self.pwconv1(y)))).transpose([0, 3, 1, 2])


class ConvNext(nn.Layer):
    """All downsamplings in a list of their own, before the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.downsample_layers = nn.LayerList([nn.Sequential(nn.Conv2D(3, 4, 2, 2), ChannelsFirstNorm(4))])
        for inner, outer in ((4, 6), (6, 8)):
            self.downsample_layers.append(nn.Sequential(ChannelsFirstNorm(inner), nn.Conv2D(inner, outer, 2, 2)))
        widths = ((4, 1), (6, 2), (8, 1))
        self.stages = nn.LayerList([nn.Sequential(*[Block(width) for _ in range(d)]) for width, d in widths])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(downsample(x))
        return self.head(x.mean([2, 3]))


class WindowAttention(nn.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.relative_position_bias_table = self.create_parameter([7, 2])
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape([batch, length, 3, 2, width // 2]).transpose([2, 0, 3, 1, 4])
        index = paddle.arange(4).unsqueeze(1) - paddle.arange(4) + 3
        bias = self.relative_position_bias_table[index.flatten()].reshape([4, 4, 2]).transpose([2, 0, 1])
        scores = paddle.matmul(q, k, transpose_y=True) / (width // 2) ** 0.5 + bias
        return self.proj(paddle.matmul(F.softmax(scores, -1), v).transpose([0, 2, 1, 3]).flatten(2))


class PatchMerging(nn.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduction, self.norm = nn.Linear(2 * width, width, bias_attr=False), nn.LayerNorm(2 * width)

    def forward(self, x: Any) -> Any:
        merged = paddle.concat([x[:, 0::2], x[:, 1::2]], -1)
        return self.reduction(self.norm(paddle.repeat_interleave(merged, 2, 1)))


class SwinBlock(nn.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), WindowAttention(width)

    def forward(self, x: Any) -> Any:
        return x + self.attn(self.norm1(x))


class Swin(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([SwinBlock(8), SwinBlock(8)])
        self.downsample, self.norm = PatchMerging(8), nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        return self.norm(self.blocks[1](self.downsample(self.blocks[0](x))))

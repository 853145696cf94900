"""The models of `twins_torch` as somebody else would write them for paddle: other names, other depths."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional


class Mlp(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3, bias_attr=False)
        )

    def forward(self, x: Any) -> Any:
        return self.net(x)


class Cnn(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2D(3, 8, 3, padding=1, bias_attr=False),
            nn.BatchNorm2D(8),
            nn.ReLU(),
            nn.MaxPool2D(2),
            nn.Conv2D(8, 16, 3, stride=2, groups=2),
            nn.BatchNorm2D(16),
            nn.Silu(),
            nn.AdaptiveAvgPool2D(1),
            nn.Flatten(),
            nn.Dropout(0.0),
        )
        self.classifier = nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        return self.classifier(self.features(x))


class ConvNorm(nn.Layer):
    def __init__(self, inner: int, outer: int, size: int, stride: int, relu: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2D(inner, outer, size, stride, size // 2, bias_attr=False)
        self.norm = nn.BatchNorm2D(outer)
        self.act = nn.ReLU() if relu else None

    def forward(self, x: Any) -> Any:
        x = self.norm(self.conv(x))
        return x if self.act is None else self.act(x)


class Unit(nn.Layer):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = ConvNorm(inner, outer, 3, stride), ConvNorm(outer, outer, 3, 1, relu=False)
        self.short = ConvNorm(inner, outer, 1, stride, relu=False) if stride != 1 else None

    def forward(self, x: Any) -> Any:
        y = self.second(self.first(x))
        return functional.relu(y + (x if self.short is None else self.short(x)))


class Stage(nn.Layer):
    def __init__(self, *units: nn.Layer) -> None:
        super().__init__()
        self.blocks = nn.LayerList(units)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class ResNet(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 8, 3, 1)
        self.stages = nn.LayerList([Stage(Unit(8, 8, 1), Unit(8, 8, 1)), Stage(Unit(8, 16, 2), Unit(16, 16, 1))])
        self.pool, self.classifier = nn.AdaptiveAvgPool2D(1), nn.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.classifier(self.pool(x).flatten(1))


class Encoder(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation="gelu")
        self.body = nn.TransformerEncoder(layer, 2)
        self.classifier = nn.Linear(16, 20)

    def forward(self, tokens: Any) -> Any:
        return self.classifier(self.body(self.embedding(tokens)))


class SelfAttention(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, hidden: Any, attn_mask: Any = None) -> Any:
        q, k, v = (
            part(hidden).reshape([0, 0, 4, 4]).transpose([0, 2, 1, 3]) for part in (self.query, self.key, self.value)
        )
        scores = paddle.matmul(q, k, transpose_y=True) * 0.5
        if attn_mask is not None:
            scores = scores + attn_mask
        mixed = paddle.matmul(functional.softmax(scores, -1), v).transpose([0, 2, 1, 3])
        return self.proj(mixed.flatten(2))


class RMSNorm(nn.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = self.create_parameter([width], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Any) -> Any:
        return x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.scale


class FeedForward(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(*s, bias_attr=False) for s in ((16, 40), (16, 40), (40, 16))
        )

    def forward(self, x: Any) -> Any:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.self_attn = RMSNorm(16), SelfAttention()
        self.post_norm, self.mlp = RMSNorm(16), FeedForward()

    def forward(self, x: Any, mask: Any) -> Any:
        x = x + self.self_attn(self.input_norm(x), attn_mask=mask)
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.blocks = nn.LayerList([DecoderLayer(), DecoderLayer()])
        self.final_norm = RMSNorm(16)
        self.register_buffer("mask", paddle.to_tensor(np.triu(np.full((7, 7), -1e9, np.float32), 1)))

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.mask)
        return paddle.matmul(self.final_norm(x), self.tokens.weight, transpose_y=True)


class Packed(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attn, self.norm = nn.Linear(6, 16), nn.MultiHeadAttention(16, 4), nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        return self.head(self.norm(y + self.attn(y, y, y)))


class PackedByHand(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attn, self.norm = nn.Linear(6, 16), SelfAttention(), nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        return self.head(self.norm(y + self.attn(y)))


class Recurrent(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 12, num_layers=2, direction="bidirect")
        self.gru = nn.GRU(24, 10)
        self.head = nn.Linear(10, 4)

    def forward(self, tokens: Any) -> Any:
        x, _ = self.lstm(self.embed(tokens))
        x, last = self.gru(x)
        return self.head(x[:, -1] + last[-1])


class SequenceFirst(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 12), nn.Linear(12, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0][:, -1])


class AutoEncoder(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2D(3, 8, 4, 2, 1)
        self.norm = nn.GroupNorm(2, 8)
        self.act = nn.PReLU(8)
        self.middle = nn.InstanceNorm2D(8)
        self.up = nn.Conv2DTranspose(8, 6, 4, 2, 1, groups=2)
        self.out = nn.Conv1D(6, 3, 1)

    def forward(self, x: Any) -> Any:
        y = self.up(self.middle(self.act(self.norm(self.down(x)))))
        return functional.sigmoid(self.out(y.flatten(2)))


class Tied(nn.Layer):
    """Paddle's Linear is transposed, so its head has a separate weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20, bias_attr=False)

    def forward(self, tokens: Any) -> Any:
        return self.head(functional.tanh(self.mix(self.embed(tokens))))

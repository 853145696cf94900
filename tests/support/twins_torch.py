"""Small models as somebody would write them for torch; `twins_paddle` has the same ones as somebody else would."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3, bias=False)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.fc2(self.act(self.fc1(x)))))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2, groups=2),
            nn.BatchNorm2d(16),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.0),
        )
        self.classifier = nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        return self.classifier(self.features(x))


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        self.relu = nn.ReLU()

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.layer1 = nn.Sequential(Block(8, 8, 1), Block(8, 8, 1))
        self.layer2 = nn.Sequential(Block(8, 16, 2), Block(16, 16, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(self.avgpool(x).flatten(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.encoder(self.embed(tokens)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Any, mask: Any = None) -> Any:
        q, k, v = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / 2.0
        if mask is not None:
            scores = scores + mask
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class DecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = RMSNorm(16), Attention(), RMSNorm(16)
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((16, 40), (16, 40), (40, 16)))

    def forward(self, x: Any, mask: Any) -> Any:
        x = x + self.attention(self.norm1(x), mask=mask)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList([DecoderBlock(), DecoderBlock()])
        self.norm = RMSNorm(16)
        self.register_buffer("mask", torch.triu(torch.full((7, 7), -1e9), 1))

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.mask)
        return functional.linear(self.norm(x), self.embed.weight)


class Packed(nn.Module):
    """torch's own attention, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attn, self.norm = nn.Linear(6, 16), nn.MultiheadAttention(16, 4), nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        y = self.inner(x).transpose(0, 1)
        y = self.norm(y + self.attn(y, y, y, need_weights=False)[0])
        return self.head(y.transpose(0, 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(24, 10, batch_first=True)
        self.head = nn.Linear(10, 4)

    def forward(self, tokens: Any) -> Any:
        x, _ = self.lstm(self.embed(tokens))
        x, last = self.gru(x)
        return self.head(x[:, -1] + last[-1])


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 12), nn.Linear(12, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x.transpose(0, 1))[0][-1])


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 4, 2, 1)
        self.norm = nn.GroupNorm(2, 8)
        self.act = nn.PReLU(8)
        self.middle = nn.InstanceNorm2d(8, affine=True)
        self.up = nn.ConvTranspose2d(8, 6, 4, 2, 1, groups=2)
        self.out = nn.Conv1d(6, 3, 1)

    def forward(self, x: Any) -> Any:
        y = self.up(self.middle(self.act(self.norm(self.down(x)))))
        return self.out(y.flatten(2)).sigmoid()


class Tied(nn.Module):
    """Two modules share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.mix(self.embed(tokens)).tanh())

"""Small but real models in plain torch. Each is below a million parameters and trains a step in a few milliseconds.

Code of a container between its children is in a separate method if a mistake is planted there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, WORDS, CLASSES = 64, 4, 16, 97, 10


def split_heads(x: Tensor, heads: int = HEADS) -> Tensor:
    batch, length, width = x.shape
    return x.view(batch, length, heads, width // heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    batch, heads, length, width = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * width)


# --- a decoder: rotary positions, RMSNorm, SwiGLU, the embedding tied to the head -----------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """Tables of cosines and sines, looked up by position."""

    def __init__(self, width: int, length: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.width, self.length = width, length
        cos, sin = self.tables(base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def tables(self, base: float) -> tuple[Tensor, Tensor]:
        frequency = base ** (-torch.arange(0, self.width, 2) / self.width)
        angle = torch.arange(self.length)[:, None] * frequency.repeat(2)
        return angle.cos(), angle.sin()

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]


class CausalCore(nn.Module):
    """Attention proper: scores, mask, softmax, the weighted sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = width**-0.5
        self.ahead = 1  # the first diagonal that may not be seen

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * self.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(self.ahead)
        return self.softmax(scores.masked_fill(hidden, float("-inf"))) @ v


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.core = CausalCore(width // heads)
        self.out = nn.Linear(width, width, bias=False)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    def split(self, x: Tensor) -> Tensor:
        return split_heads(x, self.heads)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        return self.out(join_heads(self.core(self.rotate(q, cos, sin), self.rotate(k, cos, sin), v)))


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.act = nn.SiLU()
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(width)
        self.attention = CausalAttention(width, heads)
        self.norm2 = RMSNorm(width)
        self.mlp = SwiGLU(width, 2 * width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.rotary = Rotary(WIDTH // HEADS, 2 * LENGTH)
        self.layers = nn.ModuleList(DecoderLayer(WIDTH, HEADS) for _ in range(layers))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def positions(self, length: int) -> Tensor:
        return torch.arange(length)

    def stack(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.rotary(self.positions(tokens.shape[1]))
        x = self.embed(tokens)
        for layer in self.stack():
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


# --- an encoder: LayerNorm after each half, GELU, a padding mask -----------------------------------------------------


class PaddedCore(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = width**-0.5
        self.blocked = -1e9  # finite: a row without any token must not become NaN

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * self.scale
        return scores.masked_fill(~mask[:, None, None, :], self.blocked).softmax(-1) @ v


class PaddedAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.core = PaddedCore(width // heads)
        self.out = nn.Linear(width, width)

    def clear(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(~mask[..., None], 0.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.clear(x, mask)).chunk(3, -1))
        return self.out(join_heads(self.core(q, k, v, mask=mask)))


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = PaddedAttention(width, heads)
        self.dropout = nn.Dropout(0.0)
        self.norm1 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, mask=mask)))
        return self.norm2(x + self.fc2(self.act(self.fc1(x))))


class Encoder(nn.Module):
    """Reads a sentence and says which of ten kinds it is."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(EncoderLayer(WIDTH, HEADS) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def mask(self, tokens: Tensor) -> Tensor:
        return tokens != 0

    def pool(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = self.mask(tokens)
        x = self.norm(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(self.pool(x, mask))


# --- a vision transformer --------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        return self.out(join_heads(F.scaled_dot_product_attention(q, k, v)))


class VisionLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    def __init__(self, layers: int = 2, size: int = 16, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, patch, stride=patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, WIDTH))
        self.layers = nn.ModuleList(VisionLayer(WIDTH, HEADS) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def tokens(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        return torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.places

    def pool(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(self.patches(images))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.pool(self.norm(x)))


# --- a residual convolutional network --------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)  # called twice
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(width, out, 1, stride, bias=False) if (width, stride) != (out, 1) else None

    def join(self, out: Tensor, x: Tensor) -> Tensor:
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))), x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(ResidualBlock(16, 16), ResidualBlock(16, 32, 2), ResidualBlock(32, 32))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def frozen_resnet() -> nn.Module:
    """As in fine-tuning: batch norms have statistics of an earlier training, and use them."""
    model = ResNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
            module.eval()
    return model


# --- a recurrent language model --------------------------------------------------------------------------------------


class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight_x = nn.Parameter(torch.randn(4 * width, width) * width**-0.5)
        self.weight_h = nn.Parameter(torch.randn(4 * width, width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(4 * width))
        with torch.no_grad():
            self.bias[width : 2 * width] = 1.0  # the forget gate starts open

    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return (F.linear(x, self.weight_x, self.bias) + F.linear(h, self.weight_h)).chunk(4, -1)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = self.gates(x, h)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Recurrent(nn.Module):
    def __init__(self, layers: int = 2, length: int = 8) -> None:
        super().__init__()
        self.length = length
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.cells = nn.ModuleList(Cell(WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def start(self, batch: int) -> list[tuple[Tensor, Tensor]]:
        return [(torch.zeros(batch, WIDTH), torch.zeros(batch, WIDTH)) for _ in self.cells]

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.start(len(tokens))
        outputs = []
        for x in self.embed(tokens).unbind(1):
            for index, cell in enumerate(self.cells):
                x, c = cell(x, *state[index])
                state[index] = (x, c)
            outputs.append(x)
        return self.head(torch.stack(outputs, 1))


# --- a mixture of experts --------------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Mixture(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.top = 2
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = scores.softmax(-1).topk(self.top, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.route(self.router(flat))
        total = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            part = expert(flat[rows]) * weights[rows, slots, None]
            total = total.index_add(0, rows, part.to(total.dtype))
        return total.view_as(x)


class MixtureLayer(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.moe = Mixture(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Experts(nn.Module):
    def __init__(self, layers: int = 2, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(MixtureLayer(WIDTH, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": Decoder,
    "encoder": Encoder,
    "vision": Vision,
    "resnet": ResNet,
    "frozen resnet": frozen_resnet,
    "recurrent": Recurrent,
    "experts": Experts,
}

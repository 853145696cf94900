"""Recurrences with other forms, long convolutions, codes of a book, forces, and two networks that look at each other."""

# ruff: noqa: E501 - code and its other version are easier to compare in one line each

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from field.kit.data import Batch
from field.kit.patches import does

from .kinds import Handwritten, in_every
from .texts import ROWS, WORDS, next_token

LENGTH, WIDTH, HEADS = 16, 24, 3


def _texts(random: torch.Generator) -> Batch:
    tokens = torch.randint(3, WORDS, (ROWS, LENGTH + 1), generator=random)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


# --- a recurrence that is a sum over time, too -----------------------------------------------------------------------


class Retention(nn.Module):
    """Attention without a softmax, whose weights decay with distance."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.register_buffer("decay", 1 - 2.0 ** (-2 - torch.arange(HEADS)))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        at = torch.arange(length)
        decay = torch.where(at[:, None] >= at, self.decay[:, None, None] ** (at[:, None] - at).clamp(min=0), 0.0)
        y = (q @ k.mT * decay.to(q.dtype)) @ v
        y = F.layer_norm(y.transpose(1, 2), (width // HEADS,)).reshape(rows, length, width)
        return self.out(F.silu(self.gate(x)) * y)


_RECURRENT = """state, made = torch.zeros(rows, HEADS, width // HEADS, width // HEADS), []
    for t in range(length):
        state = self.decay[:, None, None] * state + k[:, :, t, :, None].float() * v[:, :, t, None].float()
        made.append((q[:, :, t, None].float() @ state)[:, :, 0])
    y = torch.stack(made, 2).to(q.dtype)"""


class RetentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mix, self.norm2 = nn.RMSNorm(WIDTH), Retention(), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        a, b = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.gelu(a) * b)


class RetNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.Sequential(RetentionBlock(), RetentionBlock())
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


RETENTION = Handwritten(
    RetNet, _texts, next_token, held_out=True, splits=True, checkpoints=("blocks.0", "blocks.1"),
    rewrites={
        "recurrent": in_every("Retention", "y = (q @ k.mT * decay.to(q.dtype)) @ v", _RECURRENT),
        "by einsum": in_every("Retention", "(q @ k.mT * decay.to(q.dtype)) @ v", "torch.einsum('bhtd,bhsd,hts,bhse->bhte', q, k, decay.to(q.dtype), v)"),
    },
    mistakes=(
        ("decay of another head", "blocks.1.mix", ("self.decay[:, None, None] **", "self.decay.flip(0)[:, None, None] **")),
        ("position left out", "blocks.0.mix", ("at[:, None] >= at,", "at[:, None] > at,")),
        ("gate by sigmoid", "blocks.1.mix", ("F.silu(self.gate(x))", "torch.sigmoid(self.gate(x))")),
        ("key detached", "blocks.0.mix", ("q @ k.mT", "q @ k.mT.detach()"), "backward"),
    ),
)  # fmt: skip


# --- convolutions as long as the text --------------------------------------------------------------------------------


class LongConv(nn.Module):
    """A convolution over all positions before, by Fourier transforms, with a filter that a network makes."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.filter1, self.filter2 = nn.Linear(3, 16), nn.Linear(16, WIDTH)
        self.rate, self.skip = nn.Parameter(torch.linspace(0.05, 0.5, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        a, b, v = self.into(x).chunk(3, -1)
        at = torch.arange(n)[:, None]
        angle = 2 * math.pi * at / n
        k = self.filter2(torch.sin(3 * self.filter1(torch.cat([at / n, angle.sin(), angle.cos()], -1)))).float()
        k, v = k * torch.exp(-self.rate.abs() * at), (v * b).float()
        y = torch.fft.irfft(torch.fft.rfft(v, 2 * n, 1) * torch.fft.rfft(k, 2 * n, 0), 2 * n, 1)[:, :n]
        return self.out(a * (y + v * self.skip).to(a.dtype))


_FOURIER = "torch.fft.irfft(torch.fft.rfft(v, 2 * n, 1) * torch.fft.rfft(k, 2 * n, 0), 2 * n, 1)[:, :n]"


class Hyena(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix1, self.mix2, self.head = LongConv(), LongConv(), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.mix1(self.norm1(x))
        return self.head(x + self.mix2(self.norm2(x)))


HYENA = Handwritten(
    Hyena, _texts, next_token, held_out=True, splits=True,
    rewrites={
        "convolved": in_every("LongConv", _FOURIER, "F.conv1d(F.pad(v.mT, (n - 1, 0)), k.T.flip(-1)[:, None], groups=v.shape[-1]).mT"),
        "longer transforms": in_every("LongConv", _FOURIER, "torch.fft.ifft(torch.fft.fft(v, 3 * n, 1) * torch.fft.fft(k, 3 * n, 0), 3 * n, 1).real[:, :n]"),
    },
    mistakes=(
        ("wrapped around", "mix1", (_FOURIER, "torch.fft.irfft(torch.fft.rfft(v, n, 1) * torch.fft.rfft(k, n, 0), n, 1)")),
        ("decays too slowly", "mix2", ("-self.rate.abs() * at", "-0.9 * self.rate.abs() * at")),
        ("skip not trained", "mix2", ("v * self.skip", "v * self.skip.detach()"), "backward"),
    ),
)  # fmt: skip


# --- codes of a book -------------------------------------------------------------------------------------------------


class Quantize(nn.Module):
    """Replaces each vector by the nearest code, and moves codes to the mean of their vectors."""

    def __init__(self) -> None:
        super().__init__()
        book = torch.randn(24, 8)
        self.register_buffer("book", book)
        self.register_buffer("counts", torch.ones(24))
        self.register_buffer("sums", book.clone())

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = image.movedim(1, -1).flatten(0, -2).float()
        far = (x[:, None] - self.book).square().sum(-1)
        code = far.argmin(-1)
        found = self.book[code].view(len(image), *image.shape[2:], -1).movedim(-1, 1).to(image.dtype)
        with torch.no_grad():
            hit = F.one_hot(code, 24).float()
            self.counts.mul_(0.9).add_(hit.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(hit.T @ x, alpha=0.1)
            self.book.copy_(self.sums / (self.counts[:, None] + 1e-5))
        return image + (found - image).detach(), (image.float() - found.float().detach()).square().mean(), code


class VqVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)
        )
        self.quantize = Quantize()
        self.decode = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.SiLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found, apart, _ = self.quantize(self.encode(images))
        return self.decode(found), apart


def _rebuilt(model: nn.Module, batch: Batch) -> Tensor:
    made, apart = model(batch["images"])
    return F.mse_loss(made.float(), batch["images"].float()) + 0.25 * apart


CODES = Handwritten(
    VqVae, lambda random: {"images": torch.randn(6, 3, 12, 12, generator=random).cumsum(-1) / 2}, _rebuilt,
    rewrites={
        "distance by product": in_every(
            "Quantize", "(x[:, None] - self.book).square().sum(-1)",
            "x.square().sum(-1, keepdim=True) - 2 * x @ self.book.T + self.book.square().sum(-1)",
        ),
        "sums by index": in_every("Quantize", "hit.T @ x", "torch.zeros_like(self.sums).index_add(0, code, x)"),
    },
    mistakes=(
        ("nothing sent back", "quantize", ("image + (found - image).detach(), (", "found.detach(), ("), "backward"),
        ("other decay", "quantize", ("self.sums.mul_(0.9)", "self.sums.mul_(0.8)")),
        ("other distance", "quantize", ("(x[:, None] - self.book).square().sum(-1)", "-(x @ self.book.T)")),
    ),
)  # fmt: skip


# --- forces ----------------------------------------------------------------------------------------------------------


class Message(nn.Module):
    """All atoms of a molecule tell each other how far they are; states and positions change."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.edge, self.move = (
            nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()),
            nn.Linear(width, 1),
        )
        self.node = nn.Linear(2 * width, width)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        apart = x[:, :, None] - x[:, None]
        far = apart.square().sum(-1, keepdim=True)
        n = h.shape[1]
        pairs = torch.cat([h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1), far / (1 + far)], -1)
        sent = self.edge(pairs)
        x = x + (apart / (1 + far) * self.move(sent)).mean(2)
        return h + torch.tanh(self.node(torch.cat([h, sent.mean(2)], -1))), x


class Molecules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(5, 12), nn.ModuleList(Message() for _ in range(2))
        self.energy = nn.Linear(12, 1)

    def forward(self, atoms: Tensor, x: Tensor) -> Tensor:
        h = self.embed(atoms)
        for layer in self.layers:
            h, x = layer(h, x)
        return self.energy(h).sum((1, 2))


def _molecules(random: torch.Generator) -> Batch:
    return {
        "atoms": torch.randint(5, (4, 6), generator=random), "positions": torch.randn(4, 6, 3, generator=random),
        "labels": torch.randn(4, generator=random),
    }  # fmt: skip


def _with_forces(model: nn.Module, batch: Batch) -> Tensor:
    x = batch["positions"].clone().requires_grad_()
    energy = model(batch["atoms"], x)
    (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return F.mse_loss(energy, batch["labels"]) + forces.square().mean()


FORCES = Handwritten(
    Molecules, _molecules, _with_forces, short=False, compiles=False,
    rewrites={
        "parts of the first layer": in_every("Message", "self.edge(pairs)", "self.edge[1:](F.linear(pairs[..., :24], self.edge[0].weight[:, :24]) + far / (1 + far) * self.edge[0].weight[:, 24] + self.edge[0].bias)"),
        "means by sums": in_every("Message", "sent.mean(2)", "sent.sum(2) / n"),
    },
    mistakes=(
        ("other way", "layers.0", ("x = x + (apart", "x = x - (apart")),
        ("not averaged", "layers.1", ("sent.mean(2)", "sent.sum(2)")),
        ("distance of another kind", "layers.1", ("far = apart.square().sum(-1, keepdim=True)", "far = apart.abs().sum(-1, keepdim=True)")),
    ),
)  # fmt: skip


# --- two networks that look at each other ----------------------------------------------------------------------------


class Views(nn.Module):
    """One network predicts what another makes of another view. The other one is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(
            nn.Conv2d(3, 12, 3, 2, 1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(48, 20),
        )
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predict = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 20))

    def forward(self, images: Tensor, others: Tensor) -> Tensor:
        p, q = self.predict(self.online(images)), self.predict(self.online(others))
        with torch.no_grad():
            s, t = self.target(images), self.target(others)
        return (_unlike(p, t) + _unlike(q, s)).mean()


def _unlike(ours: Tensor, theirs: Tensor) -> Tensor:
    return 2 - 2 * F.cosine_similarity(ours.float(), theirs.float(), dim=-1)


def _apart(ours: Tensor, theirs: Tensor) -> Tensor:
    return (F.normalize(ours.float(), dim=-1) - F.normalize(theirs.float(), dim=-1)).square().sum(-1)


def _views(random: torch.Generator) -> Batch:
    images = torch.randn(12, 3, 8, 8, generator=random)
    return {"images": images, "others": images + 0.2 * torch.randn(images.shape, generator=random)}


VIEWS = Handwritten(
    Views, _views, lambda model, batch: model(batch["images"], batch["others"]),
    rewrites={
        "apart": in_every("Views", "(_unlike(p, t) + _unlike(q, s)).mean()", "(_apart(p, t) + _apart(q, s)).mean()"),
        "pool by mean": does("online.3", lambda self, x: x.unflatten(2, (2, -1)).unflatten(4, (2, -1)).mean((3, 5))),
    },
    mistakes=(
        ("one view alone", "", ("(_unlike(p, t) + _unlike(q, s)).mean()", "2 * _unlike(p, t).mean()")),
        ("other momentum", "online.1", {"momentum": 0.05}),
        ("same view", "", ("_unlike(p, t)", "_unlike(p, s)")),
    ),
)  # fmt: skip

"""Models of sequences in time: recurrent cells, a state-space model, dilated convolutions, CTC, a CRF."""

# ruff: noqa: E501 - code and its other version are easier to compare in one line each

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from field.kit.data import Batch
from field.kit.patches import does, trains

from .kinds import Handwritten, in_every
from .texts import LENGTH, ROWS, WORDS, next_token, padded, tokens

WIDTH = 20


# --- recurrent cells -------------------------------------------------------------------------------------------------


class Seq2Seq(nn.Module):
    """An LSTM that reads, and one that writes and looks back by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.cell, self.query = nn.LSTMCell(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, (h, c) = self.encoder(self.embed(source))
        h, c, context = h[0], c[0], memory.mean(1)
        written = []
        for x in self.embed(target).unbind(1):
            h, c = self.cell(torch.cat([x, context], -1), (h, c))
            weights = torch.bmm(memory, self.query(h)[:, :, None]).softmax(1)
            context = (weights * memory).sum(1)
            written.append(self.head(torch.cat([h, context], -1)))
        return torch.stack(written, 1)


def _sentences(random: torch.Generator) -> Batch:
    source, target = tokens(random), tokens(random)
    return {"source": source["tokens"], "target": target["tokens"][:, :6], "labels": target["labels"][:, :6]}


def _written(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["source"], batch["target"]).flatten(0, 1).float(), batch["labels"].flatten())


def lstm_by_hand(self: Any, x: Tensor) -> Any:
    h = c = torch.zeros(len(x), WIDTH, dtype=x.dtype)
    made = []
    for step in x.unbind(1):
        gates = F.linear(step, self.weight_ih_l0, self.bias_ih_l0) + F.linear(h, self.weight_hh_l0, self.bias_hh_l0)
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        made.append(h)
    return torch.stack(made, 1), (h[None], c[None])


SEQ2SEQ = Handwritten(
    Seq2Seq, _sentences, _written, splits=True,
    rewrites={
        "lstm by hand": does("encoder", lstm_by_hand),
        "attention by einsum": in_every(
            "Seq2Seq", "(weights * memory).sum(1)", "torch.einsum('bt,btd->bd', weights[..., 0], memory)"
        ),
    },
    mistakes=(
        ("softmax over features", "", (".softmax(1)", ".softmax(0)")),
        ("state of the first", "", ("h, c, context = h[0], c[0]", "h, c, context = memory[:, 0], c[0]")),
        ("cell state lost", "", ("(h, c))", "(h, c.detach()))"), "backward"),
        ("context too late", "", ("self.head(torch.cat([h, context], -1))", "self.head(torch.cat([h, memory.mean(1)], -1))")),
    ),
)  # fmt: skip


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        h = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        for step, here in zip(x.unbind(1), seen.unbind(1), strict=True):
            r, z, n = self.given(step).chunk(3, -1)
            hr, hz, hn = self.kept(h).chunk(3, -1)
            z = torch.sigmoid(z + hz)
            n = torch.tanh(n + torch.sigmoid(r + hr) * hn)
            h = torch.where(here[:, None], (1 - z) * n + z * h, h)
        return h


class GruClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.forth, self.back = nn.Embedding(WORDS, WIDTH), Gru(), Gru()
        self.norm, self.head = nn.BatchNorm1d(2 * WIDTH), nn.Linear(2 * WIDTH, 4)

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        x = self.embed(tokens)
        both = torch.cat([self.forth(x, seen), self.back(x.flip(1), seen.flip(1))], -1)
        return self.head(self.norm(both))


def _rated(random: torch.Generator) -> Batch:
    return padded(random) | {"labels": torch.randint(4, (ROWS,), generator=random)}


GRU = Handwritten(
    GruClassifier, _rated,
    lambda model, batch: F.multi_margin_loss(model(batch["tokens"], batch["seen"]).float(), batch["labels"]),
    held_out=True,
    rewrites={
        "interpolated": in_every("Gru", "(1 - z) * n + z * h", "torch.lerp(n, h, z)"),
        "in parts": in_every("Gru", "torch.sigmoid(r + hr) * hn", "hn / (1 + torch.exp(-(r + hr)))"),
    },
    mistakes=(
        ("gates swapped", "forth", ("hr, hz, hn = self.kept", "hz, hr, hn = self.kept")),
        ("padding read", "back", ("torch.where(here[:, None], (1 - z) * n + z * h, h)", "(1 - z) * n + z * h")),
        ("not reversed", "", ("self.back(x.flip(1), seen.flip(1))", "self.back(x, seen)")),
    ),
)  # fmt: skip


# --- state spaces ----------------------------------------------------------------------------------------------------


class Ssm(nn.Module):
    """A selective scan: decay, input and output depend on the token."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.into, self.conv = nn.Linear(WIDTH, 2 * WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.chosen, self.step = nn.Linear(WIDTH, 2 * states), nn.Linear(WIDTH, WIDTH)
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(WIDTH, 1))
        self.d, self.out = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        b, c = self.chosen(u).chunk(2, -1)
        dt = F.softplus(self.step(u))
        y = self.scan(u, dt, b, c)
        return self.out((y + self.d * u) * F.silu(gate))

    def scan(self, u: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decay = torch.exp(-dt[..., None] * self.log_a.exp())
        given = (dt * u)[..., None] * b[:, :, None, :]
        state, made = torch.zeros_like(given[:, 0]), []
        for t in range(u.shape[1]):
            state = decay[:, t] * state + given[:, t]
            made.append((state * c[:, t, None, :]).sum(-1))
        return torch.stack(made, 1)


def scan_by_matrix(self: Any, u: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """All pairs of times at once, with the decay between them."""
    total = torch.cumsum(dt, 1)
    between = (total[:, :, None] - total[:, None, :])[..., None] * self.log_a.exp()
    later = torch.ones(u.shape[1], u.shape[1], dtype=torch.bool).tril()
    weight = torch.exp(-between.masked_fill(~later[None, :, :, None, None], float("inf")))
    return torch.einsum("btsdn,bsdn,btn->btd", weight, (dt * u)[..., None] * b[:, :, None, :], c)


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norms = nn.Embedding(WORDS, WIDTH), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers, self.head = nn.ModuleList(Ssm() for _ in range(2)), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def _by_matrix(training: Any) -> None:
    for layer in ("layers.0", "layers.1"):
        does(layer, scan_by_matrix, "scan")(training)


MAMBA = Handwritten(
    Mamba, tokens, next_token, splits=True, checkpoints=("layers.0",),
    rewrites={
        "scan by matrix": _by_matrix,
        "convolution by shifts": in_every(
            "Ssm", "self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)",
            "sum(F.pad(u, (0, 0, 2 - k, 0))[:, : x.shape[1]] * self.conv.weight[:, 0, k] for k in range(3)) + self.conv.bias",
        ),
    },
    mistakes=(
        ("sees the future", "layers.0", ("[..., : x.shape[1]]", "[..., 2:]")),
        ("no skip", "layers.1", ("(y + self.d * u)", "y")),
        ("step without softplus", "layers.0", ("F.softplus(self.step(u))", "F.relu(self.step(u))")),
        ("decay with another sign", "layers.1", lambda t: does("layers.1", _faster, "scan")(t)),
    ),
)  # fmt: skip


def _faster(self: Any, u: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return Ssm.scan(self, u, dt, b, c.roll(1, 1))


# --- convolutions in time --------------------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv1d(12, 24, 2, dilation=dilation)
        self.skip, self.stay = nn.Conv1d(12, 12, 1), nn.Conv1d(12, 12, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f, g = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        y = torch.tanh(f) * torch.sigmoid(g)
        return x + self.stay(y), self.skip(y)


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Conv1d(1, 12, 1)
        self.layers = nn.ModuleList(Gated(2**n) for n in range(4))
        self.end1, self.end2 = nn.Conv1d(12, 16, 1), nn.Conv1d(16, 8, 1)

    def forward(self, sound: Tensor) -> Tensor:
        x, total = self.begin(sound), 0.0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.end2(F.relu(self.end1(F.relu(total))))


def _sound(random: torch.Generator) -> Batch:
    sound = torch.randn(ROWS, 1, 33, generator=random).cumsum(-1).sin()
    bins = ((sound[:, 0, 1:] + 1) * 4).long().clamp(0, 7)
    return {"sound": sound[..., :-1], "labels": bins}


WAVENET = Handwritten(
    WaveNet, _sound, lambda model, batch: F.cross_entropy(model(batch["sound"]).float(), batch["labels"]),
    held_out=True, splits=True, checkpoints=("layers.2",),
    rewrites={
        "taps apart": in_every(
            "Gated", "self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)",
            "(torch.einsum('oi,nit->not', self.conv.weight[:, :, 1], x) + torch.einsum('oi,nit->not', self.conv.weight[:, :, 0], "
            "F.pad(x, (self.dilation, 0))[..., : x.shape[-1]]) + self.conv.bias[:, None]).chunk(2, 1)",
        ),
        "skips in one sum": in_every("WaveNet", "total = total + skip", "total = skip + total"),
    },
    mistakes=(
        ("not causal", "layers.1", ("F.pad(x, (self.dilation, 0))", "F.pad(x, (0, self.dilation))")),
        ("gate and filter swapped", "layers.2", ("f, g = self.conv", "g, f = self.conv")),
        ("first skip alone", "", ("total = total + skip", "total = total + skip if layer is not self.layers[3] else total")),
    ),
)  # fmt: skip


class Speech(nn.Module):
    """Convolutions and a GRU over spectra, for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(10, WIDTH, 3, stride=2, padding=1), nn.LayerNorm(WIDTH)
        self.gru, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True), nn.Linear(2 * WIDTH, 9)

    def forward(self, spectra: Tensor) -> Tensor:
        x = F.relu(self.conv(spectra.transpose(1, 2))).transpose(1, 2)
        x, _ = self.gru(self.norm(x))
        return self.head(x).float().log_softmax(-1)


def _heard(random: torch.Generator) -> Batch:
    spectra = torch.randn(ROWS, 32, 10, generator=random)
    return {
        "spectra": spectra,
        "labels": torch.randint(1, 9, (ROWS, 5), generator=random),
        "lengths": torch.tensor([5, 4, 5, 3]),
    }


def _ctc(model: nn.Module, batch: Batch) -> Tensor:
    logs = model(batch["spectra"]).transpose(0, 1)
    return F.ctc_loss(logs, batch["labels"], torch.full((ROWS,), len(logs)), batch["lengths"])


CTC = Handwritten(
    Speech, _heard, _ctc,
    rewrites={
        "convolution in parts": in_every(
            "Speech", "self.conv(spectra.transpose(1, 2))",
            "F.conv1d(spectra.transpose(1, 2)[:, :5], self.conv.weight[:, :5], None, 2, 1) "
            "+ F.conv1d(spectra.transpose(1, 2)[:, 5:], self.conv.weight[:, 5:], self.conv.bias, 2, 1)",
        ),
        "log softmax by hand": in_every("Speech", "self.head(x).float().log_softmax(-1)", "(lambda v: v - v.logsumexp(-1, keepdim=True))(self.head(x).float())"),
    },
    mistakes=(
        ("norm after the cells", "", ("self.gru(self.norm(x))", "self.gru(x)")),
        ("softmax over time", "", (".log_softmax(-1)", ".log_softmax(1)")),
        ("another blank", "", trains(loss=lambda m, b: F.ctc_loss(m(b["spectra"]).transpose(0, 1), b["labels"] - 1, torch.full((ROWS,), 16), b["lengths"], blank=8)), "backward"),
        ("bias not used", ("conv", ""), lambda t: t.model.conv.register_parameter("bias", None)),
    ),
)  # fmt: skip


class Tagger(nn.Module):
    """A conditional random field over a convolution."""

    def __init__(self, tags: int = 6) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(WORDS, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.head, self.follows = nn.Linear(WIDTH, tags), nn.Parameter(0.3 * torch.randn(tags, tags))

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.conv(self.embed(tokens).transpose(1, 2))).transpose(1, 2)).float()
        total = scores[:, 0]
        for t in range(1, tokens.shape[1]):
            total = torch.logsumexp(total[:, :, None] + self.follows, 1) + scores[:, t]
        path = scores.gather(2, tags[..., None]).sum((1, 2)) + self.follows[tags[:, :-1], tags[:, 1:]].sum(1)
        return (torch.logsumexp(total, 1) - path).mean()


def _tagged(random: torch.Generator) -> Batch:
    return {"tokens": tokens(random)["tokens"], "tags": torch.randint(6, (ROWS, LENGTH), generator=random)}


CRF = Handwritten(
    Tagger, _tagged, lambda model, batch: model(batch["tokens"], batch["tags"]), held_out=True, splits=True,
    rewrites={
        "logsumexp by hand": in_every(
            "Tagger", "torch.logsumexp(total[:, :, None] + self.follows, 1)",
            "(lambda v: (v - v.amax(1, keepdim=True).detach()).exp().sum(1).log() + v.amax(1).detach())(total[:, :, None] + self.follows)",
        ),
        "score by one-hot": in_every("Tagger", "scores.gather(2, tags[..., None]).sum((1, 2))", "(scores * F.one_hot(tags, 6)).sum((1, 2))"),
    },
    mistakes=(
        ("transitions transposed", "", ("+ self.follows, 1)", "+ self.follows.T, 1)")),
        ("largest for sum", "", ("torch.logsumexp(total, 1) - path", "total.amax(1) - path")),
        ("first score twice", "", ("total = scores[:, 0]", "total = scores[:, 0] * 1.02")),
    ),
)  # fmt: skip

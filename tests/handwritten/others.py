"""Graphs, points, tables, towers, densities and policies."""

# ruff: noqa: E501 - code and its other version are easier to compare in one line each

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from field.kit.data import Batch
from field.kit.patches import does, has, holds, optimizes, trains

from .kinds import Handwritten, in_every

ROWS = 8


# --- graphs, points, tables ------------------------------------------------------------------------------------------


class GraphLayer(nn.Module):
    """The mean of what neighbours send."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.message, self.own, self.norm = nn.Linear(2 * width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
        total = torch.zeros_like(x).index_add_(0, target, sent.to(x.dtype))
        count = torch.zeros(len(x), dtype=x.dtype).index_add_(0, target, torch.ones(len(target), dtype=x.dtype))
        return self.norm(x + self.own(total / count.clamp(min=1)[:, None]))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(5, 16), nn.ModuleList(GraphLayer() for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.embed(nodes)
        for layer in self.layers:
            x = layer(x, source, target)
        return self.head(x)


def _graph(random: torch.Generator) -> Batch:
    ends = torch.randint(20, (2, 60), generator=random)
    return {
        "nodes": torch.randn(20, 5, generator=random), "source": ends[0], "target": ends[1],
        "labels": torch.randint(3, (20,), generator=random),
    }  # fmt: skip


def _by_matrix(self: Any, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    sent = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
    edges = F.one_hot(target, len(x)).T.to(sent.dtype)
    mean = (edges / edges.sum(1, keepdim=True).clamp(min=1)) @ sent
    return self.norm(x + self.own(mean.to(x.dtype)))


def _graphs_by_matrix(training: Any) -> None:
    for number in range(3):
        does(f"layers.{number}", _by_matrix)(training)


GNN = Handwritten(
    Graph, _graph,
    lambda model, batch: F.cross_entropy(model(batch["nodes"], batch["source"], batch["target"]).float(), batch["labels"]),
    rewrites={
        "sums by matrix": _graphs_by_matrix,
        "sums by scatter": in_every(
            "GraphLayer", "torch.zeros_like(x).index_add_(0, target, sent.to(x.dtype))",
            "torch.zeros_like(x).scatter_add(0, target[:, None].expand_as(sent), sent.to(x.dtype))",
        ),
        "in place": in_every("GraphLayer", "sent = F.relu(", "sent = torch.relu_("),
    },
    mistakes=(
        ("source and target swapped", "layers.1", ("[x[source], x[target]]", "[x[target], x[source]]")),
        ("sum for mean", "layers.0", ("self.own(total / count.clamp(min=1)[:, None])", "self.own(total)")),
        ("sent to the source", "layers.2", ("index_add_(0, target, sent.to(x.dtype))", "index_add_(0, source, sent.to(x.dtype))")),
    ),
)  # fmt: skip


class PointNet(nn.Module):
    """A maximum over points, after a learned rotation of them."""

    def __init__(self) -> None:
        super().__init__()
        self.turn1, self.turn2 = nn.Conv1d(3, 16, 1), nn.Linear(16, 9)
        self.conv1, self.bn1 = nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16)
        self.conv2, self.bn2 = nn.Conv1d(16, 32, 1), nn.BatchNorm1d(32)
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, points: Tensor) -> Tensor:
        turn = self.turn2(F.relu(self.turn1(points)).amax(-1)).view(-1, 3, 3) + torch.eye(3)
        x = torch.bmm(turn.to(points.dtype), points)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.head(x.max(-1).values)


POINTNET = Handwritten(
    PointNet,
    lambda random: {"points": torch.randn(ROWS, 3, 30, generator=random), "labels": torch.randint(4, (ROWS,), generator=random)},
    lambda model, batch: F.cross_entropy(model(batch["points"]).float(), batch["labels"]),
    held_out=True,
    rewrites={
        "rotation by einsum": in_every("PointNet", "torch.bmm(turn.to(points.dtype), points)", "torch.einsum('nij,njp->nip', turn.to(points.dtype), points)"),
        "maximum by pooling": in_every("PointNet", "x.max(-1).values", "F.max_pool1d(x, 30).squeeze(-1)"),
        "convolution by product": in_every("PointNet", "self.bn2(self.conv2(x))", "self.bn2(self.conv2.weight[:, :, 0] @ x + self.conv2.bias[:, None])"),
    },
    mistakes=(
        ("no identity", "", (" + torch.eye(3)", "")),
        ("mean for maximum", "", ("self.head(x.max(-1).values)", "self.head(x.mean(-1))")),
        ("rotation transposed", "", (".view(-1, 3, 3)", ".view(-1, 3, 3).mT")),
    ),
)  # fmt: skip


class Recommender(nn.Module):
    """Bags of categories, dense features, and products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(30, 8, mode="mean") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        parts = torch.stack([x, *(bag(sparse[:, n]).to(x.dtype) for n, bag in enumerate(self.bags))], 1)
        pairs = torch.bmm(parts, parts.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, pairs[:, rows, columns]], 1)).squeeze(1)


def _clicked(random: torch.Generator) -> Batch:
    return {
        "dense": torch.randn(ROWS, 6, generator=random), "sparse": torch.randint(30, (ROWS, 3, 4), generator=random),
        "labels": torch.randint(2, (ROWS,), generator=random).float(),
    }  # fmt: skip


DLRM = Handwritten(
    Recommender, _clicked,
    lambda model, batch: F.binary_cross_entropy_with_logits(model(batch["dense"], batch["sparse"]).float(), batch["labels"].float()),
    held_out=True, splits=True,
    rewrites={
        "bags by embeddings": in_every("Recommender", "bag(sparse[:, n])", "F.embedding(sparse[:, n], bag.weight).mean(1)"),
        "pairs one by one": in_every(
            "Recommender", "pairs[:, rows, columns]", "(parts[:, rows] * parts[:, columns]).sum(-1)"
        ),
        "loss by softplus": trains(loss=lambda m, b: (lambda v: (F.softplus(v) - v * b["labels"].float()).mean())(m(b["dense"], b["sparse"]).float())),
    },
    mistakes=(
        ("sum of bags", "bags.1", {"mode": "sum"}),
        ("upper triangle", "", ("torch.tril_indices(4, 4, -1)", "torch.triu_indices(4, 4, 1)")),
        ("table not trained", "bags.2", optimizes(lambda name, p: name == "bags.2.weight", None), "update"),
        ("features swapped", "", ("enumerate(self.bags)", "enumerate(reversed(self.bags))")),
    ),
)  # fmt: skip


# --- towers ----------------------------------------------------------------------------------------------------------


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))
        self.words, self.text = nn.Embedding(40, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        image = F.normalize(self.image(images), dim=-1)
        text = F.normalize(self.text(self.words(texts).mean(1)), dim=-1)
        return self.scale.exp().clamp(max=100) * image @ text.T


def _captions(random: torch.Generator) -> Batch:
    return {"images": torch.randn(ROWS, 12, generator=random), "texts": torch.randint(40, (ROWS, 5), generator=random)}


def _contrastive(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["images"], batch["texts"]).float()
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


CLIP = Handwritten(
    Clip, _captions, _contrastive,
    rewrites={
        "norm by hand": in_every("Clip", "F.normalize(self.image(images), dim=-1)", "(lambda v: v * v.square().sum(-1, keepdim=True).rsqrt())(self.image(images))"),
        "loss by logsumexp": trains(loss=lambda m, b: (lambda v: (v.logsumexp(0) + v.logsumexp(1) - 2 * v.diagonal()).mean() / 2)(m(b["images"], b["texts"]).float())),
    },
    mistakes=(
        ("one direction", "", trains(loss=lambda m, b: F.cross_entropy(m(b["images"], b["texts"]), torch.arange(ROWS))), "backward"),
        ("norm over rows", "", ("F.normalize(self.text(self.words(texts).mean(1)), dim=-1)", "F.normalize(self.text(self.words(texts).mean(1)), dim=0)")),
        ("scale not trained", "", ("self.scale.exp()", "self.scale.detach().exp()"), "backward"),
        ("sum of words", "", ("self.words(texts).mean(1)", "self.words(texts).sum(1)")),
    ),
)  # fmt: skip


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 8, 5, stride=2), nn.BatchNorm1d(8), nn.PReLU(8), nn.Flatten(), nn.Linear(8 * 14, 24),
            nn.BatchNorm1d(24), nn.PReLU(), nn.Linear(24, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=-1)


def _triplet(model: nn.Module, batch: Batch) -> Tensor:
    anchor, same, other = (model(batch[name]) for name in ("anchor", "same", "other"))
    return F.triplet_margin_loss(anchor.float(), same.float(), other.float(), margin=0.5)


def _triplets(random: torch.Generator) -> Batch:
    anchor, other = (torch.randn(ROWS, 1, 31, generator=random) for _ in range(2))
    return {"anchor": anchor, "same": anchor + 0.3 * torch.randn(ROWS, 1, 31, generator=random), "other": other}


def _triplet_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    anchor, same, other = (model(batch[name]).float() for name in ("anchor", "same", "other"))
    near, far = ((anchor - each + 1e-6).square().sum(-1).sqrt() for each in (same, other))
    return (near - far + 0.5).relu().mean()


SIAMESE = Handwritten(
    Siamese, _triplets, _triplet, held_out=True,
    rewrites={"loss by hand": trains(loss=_triplet_by_hand), "norm by hand": in_every("Siamese", "F.normalize(self.net(x), dim=-1)", "(lambda v: v / v.norm(dim=-1, keepdim=True).clamp(min=1e-12))(self.net(x))")},
    mistakes=(
        ("squared distance", "", trains(loss=lambda m, b: F.triplet_margin_with_distance_loss(m(b["anchor"]), m(b["same"]), m(b["other"]), distance_function=lambda u, v: (u - v).square().sum(-1), margin=0.5)), "backward"),
        ("not normed", "", ("F.normalize(self.net(x), dim=-1)", "self.net(x)")),
        ("slope badly loaded", "net.2", holds("net.2", "weight", lambda w: w * 0 + 0.01), "state"),
        ("norm epsilon", "net.5", {"eps": 1e-3}),
    ),
)  # fmt: skip


# --- densities -------------------------------------------------------------------------------------------------------


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 12))
        self.decode = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decode(z), mean, log_variance


def _elbo(model: nn.Module, batch: Batch) -> Tensor:
    made, mean, log_variance = (each.float() for each in model(batch["x"]))
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
    return F.binary_cross_entropy_with_logits(made, batch["x"].float(), reduction="sum") / len(made) + divergence


VAE = Handwritten(
    Vae, lambda random: {"x": torch.rand(ROWS, 20, generator=random)}, _elbo, held_out=True, draws=True,
    rewrites={
        "deviation by root": in_every("Vae", "torch.exp(0.5 * log_variance)", "log_variance.exp().sqrt()"),
        "in one operation": in_every("Vae", "mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)", "torch.addcmul(mean, torch.exp(0.5 * log_variance), torch.randn_like(mean))"),
    },
    mistakes=(
        ("variance for deviation", "", ("torch.exp(0.5 * log_variance)", "torch.exp(log_variance)")),
        ("divergence detached", "", ("return self.decode(z), mean", "return self.decode(z), mean.detach()"), "backward"),
        ("mean of the elements", "", trains(loss=lambda m, b: F.binary_cross_entropy_with_logits(m(b["x"])[0], b["x"])), "backward"),
    ),
)  # fmt: skip


class Gan(nn.Module):
    """A generator and a discriminator with spectral norms, in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 16), nn.Tanh())
        self.discriminator = nn.Sequential(
            spectral_norm(nn.Linear(16, 24)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(24, 1))
        )

    def forward(self, real: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fake = self.generator(z)
        return self.discriminator(real), self.discriminator(fake.detach()), self.discriminator(fake)


def _adversarial(model: nn.Module, batch: Batch) -> Tensor:
    real, made, fooled = (each.float() for each in model(batch["real"], batch["z"]))
    return F.relu(1 - real).mean() + F.relu(1 + made).mean() - fooled.mean()


GAN = Handwritten(
    Gan, lambda random: {"real": torch.randn(ROWS, 16, generator=random).tanh(), "z": torch.randn(ROWS, 6, generator=random)},
    _adversarial,
    rewrites={
        "loss by clamp": trains(loss=lambda m, b: (lambda r, f, g: (1 - r).clamp(min=0).mean() + (1 + f).clamp(min=0).mean() - g.sum() / ROWS)(*(each.float() for each in m(b["real"], b["z"])))),
    },
    mistakes=(
        ("not detached", "", ("self.discriminator(fake.detach())", "self.discriminator(fake)"), "backward"),
        ("slope", "discriminator.1", {"negative_slope": 0.02}),
        ("generator detached", "", ("fake.detach()), self.discriminator(fake)", "fake.detach()), self.discriminator(fake.detach())"), "backward"),
    ),
)  # fmt: skip


class Coupling(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.net = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1) if self.first else x.chunk(2, -1)[::-1]
        log_scale, shift = self.net(a).chunk(2, -1)
        log_scale = torch.tanh(log_scale)
        b = b * torch.exp(log_scale) + shift
        return torch.cat([a, b] if self.first else [b, a], -1), log_scale.sum(-1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(n % 2 == 0) for n in range(4))
        self.log_scale = nn.Parameter(0.1 * torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x, total = x * self.log_scale.exp(), self.log_scale.sum()
        for layer in self.layers:
            x, change = layer(x)
            total = total + change
        return total - 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)


FLOW = Handwritten(
    Flow, lambda random: {"x": torch.randn(ROWS, 8, generator=random)}, lambda model, batch: -model(batch["x"]).float().mean(), splits=True,
    checkpoints=("layers.1",),
    rewrites={
        "density of torch": in_every("Flow", "total - 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)", "total + torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(-1)"),
        "product of two": in_every("Coupling", "b * torch.exp(log_scale) + shift", "torch.addcmul(shift, b, torch.exp(log_scale))"),
    },
    mistakes=(
        ("scale not bounded", "layers.2", ("log_scale = torch.tanh(log_scale)", "log_scale = log_scale")),
        ("parts in one order", "layers.1", ("[b, a], -1)", "[a, b], -1)")),
        ("scale left out of the density", "", ("x * self.log_scale.exp(), self.log_scale.sum()", "x * self.log_scale.exp(), 0.0")),
    ),
)  # fmt: skip


class Nerf(nn.Module):
    """Sines and cosines of points on rays, and light that is absorbed along these."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(3 * 8, 32), nn.Linear(32 + 24, 32)
        self.density, self.colour = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, points: Tensor) -> Tensor:
        angles = points[..., None] * (2.0 ** torch.arange(4) * math.pi).to(points.dtype)
        given = torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)
        x = F.relu(self.net1(given))
        x = F.relu(self.net2(torch.cat([x, given], -1)))
        alpha = 1 - torch.exp(-F.relu(self.density(x)[..., 0].float()) * 0.2)
        through = torch.cumprod(1 - alpha + 1e-10, -1)
        weight = alpha * torch.cat([torch.ones_like(through[..., :1]), through[..., :-1]], -1)
        return (weight[..., None] * torch.sigmoid(self.colour(x).float())).sum(-2)


NERF = Handwritten(
    Nerf, lambda random: {"points": torch.rand(ROWS, 12, 3, generator=random), "colours": torch.rand(ROWS, 3, generator=random)},
    lambda model, batch: F.mse_loss(model(batch["points"]).float(), batch["colours"].float()), splits=True,
    rewrites={
        "light by logarithms": in_every("Nerf", "torch.cumprod(1 - alpha + 1e-10, -1)", "torch.exp(torch.cumsum(torch.log(1 - alpha + 1e-10), -1))"),
        "colours by einsum": in_every("Nerf", "(weight[..., None] * torch.sigmoid(self.colour(x).float())).sum(-2)", "torch.einsum('rs,rsc->rc', weight, torch.sigmoid(self.colour(x).float()))"),
    },
    mistakes=(
        ("light not shifted", "", ("torch.cat([torch.ones_like(through[..., :1]), through[..., :-1]], -1)", "through")),
        ("skip forgotten", "", ("torch.cat([x, given], -1)", "torch.cat([x, given * 0], -1)")),
        ("frequencies from two", "", ("2.0 ** torch.arange(4)", "2.0 ** torch.arange(1, 5)")),
    ),
)  # fmt: skip


# --- policies, and other habits --------------------------------------------------------------------------------------


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(states)
        return self.actor(x), self.critic(x).squeeze(-1)


def _played(random: torch.Generator) -> Batch:
    return {
        "states": torch.randn(16, 8, generator=random), "actions": torch.randint(4, (16,), generator=random),
        "returns": torch.randn(16, generator=random), "old": -torch.rand(16, generator=random) - 1,
    }  # fmt: skip


def _ppo(model: nn.Module, batch: Batch, bonus: float = 0.01, detached: bool = True, edge: float = 0.2) -> Tensor:
    logits, values = (each.float() for each in model(batch["states"]))
    logs = logits.log_softmax(-1)
    advantage = batch["returns"].float() - (values.detach() if detached else values)
    ratio = (logs.gather(1, batch["actions"][:, None])[:, 0] - batch["old"].float()).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - edge, 1 + edge) * advantage).mean()
    entropy = -(logs.exp() * logs).sum(-1).mean()
    return -gain - bonus * entropy + 0.5 * F.mse_loss(values, batch["returns"].float())


def _ppo_by_torch(model: nn.Module, batch: Batch) -> Tensor:
    logits, values = (each.float() for each in model(batch["states"]))
    policy = torch.distributions.Categorical(logits=logits)
    advantage = (batch["returns"].float() - values).detach()
    ratio = torch.exp(policy.log_prob(batch["actions"]) - batch["old"].float())
    gain = -torch.max(-ratio * advantage, -torch.clamp(ratio, 0.8, 1.2) * advantage).mean()
    return -gain - 0.01 * policy.entropy().mean() + (values - batch["returns"].float()).square().mean() / 2


ACTOR = Handwritten(
    ActorCritic, _played, _ppo, splits=True,
    rewrites={"loss by distributions": trains(loss=_ppo_by_torch)},
    mistakes=(
        ("advantage not detached", "", trains(loss=lambda m, b: _ppo(m, b, detached=False)), "backward"),
        ("no entropy", "", trains(loss=lambda m, b: _ppo(m, b, bonus=0.0)), "backward"),
        ("clipped elsewhere", "", trains(loss=lambda m, b: _ppo(m, b, edge=0.02)), "backward"),
        ("not clipped", lambda name, p: True, trains(clip=None), "update"),
        ("epsilon of the optimizer", lambda name, p: True, trains(adam={"eps": 1e-3}), "update"),
    ),
)  # fmt: skip


class Mixer(nn.Module):
    """Weight-normed products over places, then over channels, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.places = nn.LayerNorm(12), weight_norm(nn.Linear(9, 9))
        self.norm2, self.up, self.down = nn.LayerNorm(12), weight_norm(nn.Linear(12, 24)), nn.Linear(24, 12)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.places(self.norm1(x).mT).mT)
        x = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))
        return self.head(x.mean(1))


def _places(random: torch.Generator) -> Batch:
    return {"x": torch.randn(ROWS, 9, 12, generator=random), "labels": torch.randint(3, (ROWS,), generator=random)}


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


MIXER = Handwritten(
    Mixer, _places, lambda model, batch: F.cross_entropy(model(batch["x"]).float(), batch["labels"]), draws=True,
    rewrites={
        "gelu by hand": in_every("Mixer", 'F.gelu(self.up(self.norm2(x)), approximate="tanh")', "gelu(self.up(self.norm2(x)))", gelu=_gelu_tanh),
        "places by product": in_every("Mixer", "self.places(self.norm1(x).mT).mT", "(self.norm1(x).mT @ self.places.weight.T + self.places.bias).mT"),
    },
    mistakes=(
        ("dropout of another rate", "drop", {"p": 0.2}),
        ("mean over channels", "", ("self.norm1(x).mT).mT", "self.norm1(x.mean(1, keepdim=True).expand_as(x)).mT).mT")),
        ("seed", ("", "drop"), trains(seed=3)),
        ("weight norm badly loaded", "up.parametrizations.weight", lambda t: t.model.up.parametrizations.weight.original0.data.mul_(1.05), "state"),
    ),
)  # fmt: skip


class TiedAutoencoder(nn.Module):
    """The decoder uses the encoder's weight; a loop of residual steps in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(10, 18) / 4), nn.Parameter(torch.zeros(18))
        self.refine, self.norm = nn.Linear(10, 10), nn.LayerNorm(10)

    def forward(self, x: Tensor) -> Tensor:
        z = F.linear(x, self.weight).relu()
        for _ in range(3):
            y = F.relu(self.refine(self.norm(z)))
            z = z.clone().add_(y)
        return F.linear(z, self.weight.T, self.bias)


TIED = Handwritten(
    TiedAutoencoder, lambda random: {"x": torch.randn(ROWS, 18, generator=random)},
    lambda model, batch: F.smooth_l1_loss(model(batch["x"]).float(), batch["x"].float()), held_out=True, splits=True,
    rewrites={
        "not in place": in_every("TiedAutoencoder", "z.clone().add_(y)", "z + y"),
        "product by @": in_every("TiedAutoencoder", "F.linear(z, self.weight.T, self.bias)", "z @ self.weight + self.bias"),
    },
    mistakes=(
        ("twice for three times", "", ("range(3)", "range(2)")),
        ("decoder detached", "", ("F.linear(z, self.weight.T, self.bias)", "F.linear(z, self.weight.detach().T, self.bias)"), "backward"),
        ("norm epsilon", "norm", has("norm", eps=1e-2)),
        ("mean absolute loss", "", trains(loss=lambda m, b: F.l1_loss(m(b["x"]), b["x"])), "backward"),
    ),
)  # fmt: skip

"""Models of images: a vision transformer, U-Nets, residual networks, ConvNeXt, MobileNet."""

# ruff: noqa: E501 - code and its other version are easier to compare in one line each

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from field.kit.data import Batch
from field.kit.patches import holds, trains

from .functions import attention_by_hand, norm_by_hand
from .kinds import Handwritten, in_every

ROWS, SIZE, CLASSES = 4, 16, 5


def pictures(random: torch.Generator) -> Batch:
    images = torch.randn(ROWS, 3, SIZE, SIZE, generator=random)
    return {"images": images, "labels": torch.randint(CLASSES, (ROWS,), generator=random)}


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]).float(), batch["labels"])


# --- a vision transformer --------------------------------------------------------------------------------------------


class VitBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(VitBlock(width), VitBlock(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


VIT = Handwritten(
    Vit, pictures, classify, splits=True, checkpoints=("blocks.0",),
    rewrites={
        "attention by hand": in_every("VitBlock", "F.scaled_dot_product_attention", "by_hand", by_hand=attention_by_hand),
        "patches by matrix": in_every(
            "Vit", "self.patches(images).flatten(2).transpose(1, 2)",
            "F.linear(F.unfold(images, 4, stride=4).transpose(1, 2), self.patches.weight.flatten(1), self.patches.bias)",
        ),
        "norm by hand": in_every("VitBlock", "self.mlp(self.norm2(x))", "self.mlp(norm(x, None, self.norm2.weight, self.norm2.bias))", norm=norm_by_hand),
    },
    mistakes=(
        ("mean instead of class token", "", ("(self.blocks(x))[:, 0]", "(self.blocks(x)).mean(1)")),
        ("patches column first", "", ("self.patches(images).flatten(2)", "self.patches(images).transpose(2, 3).flatten(2)")),
        ("softmax over queries", "blocks.1", ("F.scaled_dot_product_attention(q, k, v)", "(q @ k.mT / math.sqrt(8)).softmax(-2) @ v")),
        ("gelu by tanh", "blocks.0.mlp.1", {"approximate": "tanh"}),
        ("loss summed", "", trains(loss=lambda m, b: F.cross_entropy(m(b["images"]), b["labels"], reduction="sum")), "backward"),
    ),
)  # fmt: skip


# --- U-Nets ----------------------------------------------------------------------------------------------------------


def double(given: int, made: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(given, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU(inplace=True),
        nn.Conv2d(made, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = double(3, 8), double(8, 16), double(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.join2 = nn.ConvTranspose2d(32, 16, 2, stride=2), double(32, 16)
        self.up1, self.join1 = nn.ConvTranspose2d(16, 8, 2, stride=2), double(16, 8)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        a = self.down1(images)
        b = self.down2(self.pool(a))
        c = self.middle(self.pool(b))
        b = self.join2(torch.cat([self.up2(c), b], 1))
        a = self.join1(torch.cat([self.up1(b), a], 1))
        return self.head(a)


def _segmented(random: torch.Generator) -> Batch:
    batch = pictures(random)
    return batch | {"labels": torch.randint(3, (ROWS, SIZE, SIZE), generator=random)}


def _dice(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["images"]).float()
    chances, target = logits.softmax(1), F.one_hot(batch["labels"], 3).permute(0, 3, 1, 2).float()
    both = (chances * target).sum((0, 2, 3))
    dice = 1 - (2 * both + 1) / (chances.sum((0, 2, 3)) + target.sum((0, 2, 3)) + 1)
    return F.cross_entropy(logits, batch["labels"]) + dice.mean()


UNET = Handwritten(
    UNet, _segmented, _dice,
    rewrites={
        "pool by view": in_every("UNet", "self.down2(self.pool(a))", "self.down2(a.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5)))"),
        "parts convolved apart": in_every(
            "UNet", "return self.head(a)",
            "return F.conv2d(a[:, :4], self.head.weight[:, :4]) + F.conv2d(a[:, 4:], self.head.weight[:, 4:], self.head.bias)",
        ),
    },
    mistakes=(
        ("skips swapped", "", ("torch.cat([self.up1(b), a], 1)", "torch.cat([a, self.up1(b)], 1)")),
        ("skip detached", "", ("torch.cat([self.up2(c), b], 1)", "torch.cat([self.up2(c), b.detach()], 1)"), "backward"),
        ("mean pool", "", ("self.middle(self.pool(b))", "self.middle(F.avg_pool2d(b, 2))")),
        ("batch norm epsilon", "middle.1", {"eps": 1e-3}),
        ("momentum of running means", "join1.4", {"momentum": 0.01}, "update"),
    ),
)  # fmt: skip


class TimedBlock(nn.Module):
    """A residual block of a diffusion model: the time moves its channels."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, given), nn.Conv2d(given, made, 3, padding=1)
        self.time = nn.Linear(16, 2 * made)
        self.norm2, self.conv2 = nn.GroupNorm(4, made), nn.Conv2d(made, made, 3, padding=1)
        self.skip = nn.Conv2d(given, made, 1) if given != made else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, 1)
        y = self.conv2(F.silu(self.norm2(y) * (1 + scale) + shift))
        return self.skip(x) + y


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.begin, self.down = nn.Conv2d(3, 8, 3, padding=1), TimedBlock(8, 16)
        self.smaller, self.middle = nn.Conv2d(16, 16, 3, stride=2, padding=1), TimedBlock(16, 16)
        self.up, self.end = TimedBlock(32, 8), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        angles = when[:, None] * torch.exp(-math.log(1000) * torch.arange(4) / 4).to(when.dtype)
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        a = self.down(self.begin(x), time)
        b = self.middle(self.smaller(a), time)
        b = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.end(self.up(torch.cat([a, b], 1), time))


def _noised(random: torch.Generator) -> Batch:
    images, noise = (torch.randn(ROWS, 3, SIZE, SIZE, generator=random) for _ in range(2))
    when = torch.rand(ROWS, generator=random)
    keep = torch.cos(when * math.pi / 2)[:, None, None, None]
    return {"images": keep * images + (1 - keep**2).sqrt() * noise, "when": 100 * when, "noise": noise}


DIFFUSION = Handwritten(
    Diffusion, _noised, lambda model, batch: F.mse_loss(model(batch["images"], batch["when"]).float(), batch["noise"].float()),
    held_out=True, splits=True, checkpoints=(),
    rewrites={
        "upsampling by repeats": in_every(
            "Diffusion", 'F.interpolate(b, scale_factor=2, mode="nearest")', "b.repeat_interleave(2, 2).repeat_interleave(2, 3)"
        ),
        "mean by hand": trains(loss=lambda m, b: (m(b["images"], b["when"]).float() - b["noise"].float()).square().sum() / b["noise"].numel()),
        "scale in one product": in_every("TimedBlock", "self.norm2(y) * (1 + scale) + shift", "torch.addcmul(shift, self.norm2(y), 1 + scale)"),
    },
    mistakes=(
        ("scale without one", "middle", ("(1 + scale)", "scale")),
        ("sine for cosine", "", ("[angles.sin(), angles.cos()]", "[angles.cos(), angles.sin()]")),
        ("bilinear", "", ('mode="nearest"', 'mode="bilinear"')),
        ("groups", "up.norm1", {"num_groups": 8}),
    ),
)  # fmt: skip


# --- residual networks -----------------------------------------------------------------------------------------------


class Basic(nn.Module):
    def __init__(self, given: int, made: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made)
        self.conv2, self.bn2 = nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made)
        self.short = nn.Identity()
        if stride > 1 or given != made:
            self.short = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.short(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.layers = nn.Sequential(Basic(8, 8), Basic(8, 16, 2), Basic(16, 16), Basic(16, 32, 2))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(images)).mean((2, 3)))


RESNET = Handwritten(
    ResNet, pictures, classify,
    rewrites={
        "not in place": in_every("Basic", "y += self.short(x)\n    return F.relu(y, inplace=True)", "return F.relu(y + self.short(x))"),
        "mean by pooling": in_every("ResNet", ".mean((2, 3))", ".flatten(2).sum(-1).mul(1 / 16)"),
    },
    mistakes=(
        ("activation before the sum", "layers.2", ("y += self.short(x)\n    return F.relu(y, inplace=True)", "return F.relu(y) + self.short(x)")),
        ("norm in evaluation", "layers.1.bn1", lambda training: training.model.layers[1].bn1.eval()),
        ("padding by the other edge", "layers.2.conv1", {"padding_mode": "circular", "_reversed_padding_repeated_twice": [1] * 4}),
        ("batch norm epsilon", "layers.0.bn2", {"eps": 1e-3}),
        ("largest for mean", "", (".mean((2, 3))", ".amax((2, 3))")),
    ),
)  # fmt: skip


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 5, padding=2, groups=width), nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scale = nn.Parameter(0.3 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.down(F.gelu(self.up(self.norm(y))))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stage1 = nn.Conv2d(3, 12, 2, 2), nn.Sequential(ConvNextBlock(12), ConvNextBlock(12))
        self.smaller, self.stage2 = nn.Conv2d(12, 20, 2, 2), nn.Sequential(ConvNextBlock(20))
        self.norm, self.head = nn.LayerNorm(20), nn.Linear(20, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stage2(self.smaller(self.stage1(self.stem(images))))
        return self.head(self.norm(x.mean((-2, -1))))


CONVNEXT = Handwritten(
    ConvNext, pictures, classify, held_out=True, splits=True, checkpoints=("stage1.0",),
    rewrites={
        "1x1 convolutions": in_every(
            "ConvNextBlock", "self.down(F.gelu(self.up(self.norm(y))))",
            "F.conv2d(F.gelu(F.conv2d(self.norm(y).permute(0, 3, 1, 2), self.up.weight[:, :, None, None], self.up.bias)), "
            "self.down.weight[:, :, None, None], self.down.bias).permute(0, 2, 3, 1)",
        ),
        "scale of the weight": in_every(
            "ConvNextBlock", "self.down(F.gelu(self.up(self.norm(y))))\n    return x + (self.scale * y)",
            "F.linear(F.gelu(self.up(self.norm(y))), self.scale[:, None] * self.down.weight, self.scale * self.down.bias)\n    return x + y",
        ),
    },
    mistakes=(
        ("scale lost", "stage1.1", ("(self.scale * y)", "y")),
        ("rows and columns swapped", "stage1.1", ("y = self.depthwise(x).permute(0, 2, 3, 1)", "y = self.depthwise(x).permute(0, 3, 2, 1)")),
        ("norm epsilon", "stage1.0.norm", {"eps": 1e-2}),
        ("relu for gelu", "stage1.0", ("F.gelu", "F.relu")),
    ),
)  # fmt: skip


class Inverted(nn.Module):
    """An inverted residual with squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 3 * width
        self.expand, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False)
        self.bn2, self.act = nn.BatchNorm2d(inner), nn.ReLU6()
        self.squeeze, self.excite = nn.Linear(inner, 6), nn.Linear(6, inner)
        self.project, self.bn3 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.expand(x)))
        y = self.act(self.bn2(self.depthwise(y)))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        return x + self.bn3(self.project(y * gate[:, :, None, None]))


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks, self.head = nn.Sequential(Inverted(8), Inverted(8)), nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.hardswish(self.bn(self.stem(images)))
        return self.head(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


MOBILENET = Handwritten(
    MobileNet, pictures, classify,
    rewrites={
        "gate by clamp": in_every("Inverted", "F.hardsigmoid(", "(lambda v: (v + 3).clamp(0, 6) / 6)("),
        "1x1 convolution by einsum": in_every(
            "Inverted", "self.bn1(self.expand(x))", "self.bn1(torch.einsum('oi,nihw->nohw', self.expand.weight[:, :, 0, 0], x))"
        ),
    },
    mistakes=(
        ("gate of sigmoid", "blocks.1", ("F.hardsigmoid", "torch.sigmoid")),
        ("relu for relu6", "blocks.0.act", lambda training: setattr(training.model.blocks[0].act, "max_val", 1.5)),
        ("residual lost", "blocks.1", ("return x + self.bn3", "return self.bn3")),
        ("weight badly loaded", "blocks.0.depthwise", holds("blocks.0.depthwise", "weight", lambda w: w.transpose(2, 3)), "state"),
    ),
)  # fmt: skip


def unfolded(self: Any, x: Tensor) -> Tensor:
    from .functions import conv_by_unfold

    return conv_by_unfold(x, self.weight, self.bias, self.stride[0], self.padding[0], self.groups)

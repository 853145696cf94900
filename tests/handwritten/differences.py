"""Right differences that suit many models: another order of sums, other kernels, other code of the same optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from field.bench.settings import all_linear, linear_in_chunks, sums_in_two
from field.kit.data import Batch
from field.kit.patches import Apply, both, does, reads, trains
from field.kit.wrong import checkpointed

from .functions import gelu_by_hand, norm_by_hand
from .images import unfolded
from .running import Training

SUMS, OTHER_SUMS = sums_in_two(1 / 2), sums_in_two(1 / 4)
CHUNKS = all_linear(linear_in_chunks)
THREADS = trains(threads=2)
AUTOCAST = trains(autocast=torch.bfloat16)
HALF = trains(autocast=torch.float16)
COMPILED = trains(compiled="aot_eager")
INDUCTOR = trains(compiled="inductor")


def in_bf16(training: Training) -> None:
    training.model.to(torch.bfloat16)


def channels_last(training: Training) -> None:
    training.model.to(memory_format=torch.channels_last)
    reads(lambda batch: batch | {"images": batch["images"].contiguous(memory_format=torch.channels_last)})(training)


def all_of(kind: type[nn.Module], function: Callable[..., Any]) -> Apply:
    """Every module of a class computes in another way."""

    def apply(training: Training) -> None:
        for name, module in training.model.named_modules():
            if type(module) is kind:
                does(name, function)(training)

    return apply


def _norm(self: Any, x: Tensor) -> Tensor:
    return norm_by_hand(x, None, self.weight, self.bias, self.eps)


def _group_norm(self: Any, x: Tensor) -> Tensor:
    groups = x.float().unflatten(1, (self.num_groups, -1))
    variance, mean = torch.var_mean(groups, tuple(range(2, groups.ndim)), correction=0, keepdim=True)
    normed = ((groups - mean) / (variance + self.eps).sqrt()).flatten(1, 2)
    shape = (-1, *(1,) * (x.ndim - 2))
    return (normed * self.weight.view(shape) + self.bias.view(shape)).to(x.dtype)


def _batch_norm(self: Any, x: Tensor) -> Tensor:
    """A batch norm by hand, running statistics included."""
    axes = (0, *range(2, x.ndim))
    shape = (-1, *(1,) * (x.ndim - 2))
    long = x.float()
    mean = long.mean(axes)
    variance = (long - mean.view(shape)).square().mean(axes)
    if self.training:
        count = x.numel() // x.shape[1]
        with torch.no_grad():
            self.running_mean.lerp_(mean.detach(), self.momentum)
            self.running_var.lerp_(variance.detach() * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
    scale = (self.weight * (variance + self.eps).rsqrt()).view(shape)
    return ((long - mean.view(shape)) * scale + self.bias.view(shape)).to(x.dtype)


def _gelu(self: Any, x: Tensor) -> Tensor:
    return gelu_by_hand(x)


FUNCTIONS_BY_HAND = both(
    all_of(nn.LayerNorm, _norm),
    all_of(nn.GroupNorm, _group_norm),
    all_of(nn.BatchNorm1d, _batch_norm),
    all_of(nn.BatchNorm2d, _batch_norm),
    all_of(nn.GELU, _gelu),
)
UNFOLDED = all_of(nn.Conv2d, unfolded)


def computed_again(modules: Iterable[str]) -> Apply:
    return both(*(checkpointed(module) for module in modules))


def _parts(batch: Batch, parts: int) -> list[Batch]:
    chunks = zip(*(value.chunk(parts) for value in batch.values()), strict=True)
    return [dict(zip(batch, chunk, strict=True)) for chunk in chunks]


def split(parts: int) -> Apply:
    """A step's batch in several micro batches."""

    def apply(training: Training) -> None:
        training.batches = [[part for batch in micro for part in _parts(batch, parts)] for micro in training.batches]
        training.share = 1 / parts

    return apply


# --- data and models of other sizes ----------------------------------------------------------------------------------


def _floats(change: Callable[[Tensor], Tensor]) -> Apply:
    return reads(
        lambda batch: {name: change(v) if v.is_floating_point() and v.ndim > 1 else v for name, v in batch.items()}
    )


LARGE, SMALL, ZERO = _floats(lambda x: x * 1e4), _floats(lambda x: x * 1e-4), _floats(torch.zeros_like)


def _repeated(batch: Batch) -> Batch:
    """The second half of the rows repeats the first."""
    return {name: torch.cat([v[: len(v) // 2]] * 2) if len(v) % 2 == 0 else v for name, v in batch.items()}


REPEATED = reads(_repeated)


def dead(training: Training) -> None:
    """Most ReLUs never pass anything: biases are far below zero."""
    with torch.no_grad():
        for name, parameter in training.model.named_parameters():
            if name.endswith("bias") and parameter.ndim == 1:
                parameter.sub_(0.5)


# --- optimizers ------------------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a moment."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, foreach: bool = False) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.foreach = foreach

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = 0.1 * group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                if self.foreach:
                    p.mul_(1 - rate * group["weight_decay"]).add_(torch.lerp(p.grad, moment, 0.9).sign_(), alpha=-rate)
                    moment.lerp_(p.grad, 0.01)
                else:
                    step = (0.9 * moment + 0.1 * p.grad).sign() + group["weight_decay"] * p
                    p.sub_(rate * step)
                    moment.copy_(0.99 * moment + 0.01 * p.grad)


class Adafactor(torch.optim.Optimizer):
    """Second moments of matrices by rows and columns."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, foreach: bool = False) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.foreach = foreach

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                grad, square = p.grad.flatten(1) if p.ndim > 2 else p.grad, p.grad.square() + 1e-30
                square = square.flatten(1) if p.ndim > 2 else square
                if p.ndim > 1:
                    rows, columns = square.mean(1), square.mean(0)
                    if self.foreach:
                        factor = torch.outer((rows / rows.mean()).rsqrt(), columns.rsqrt())
                        update = grad * factor
                    else:
                        update = grad / (torch.sqrt(rows / rows.mean())[:, None] * torch.sqrt(columns))
                else:
                    update = grad * square.rsqrt() if self.foreach else grad / square.sqrt()
                update = update / max(1.0, float(update.square().mean().sqrt()))
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update.view_as(p))


def _by(optimizer: Callable[..., Any], **options: Any) -> Apply:
    return trains(optimizer=functools.partial(optimizer, **options))


OPTIMIZERS: dict[str, tuple[Apply, dict[str, Apply]]] = {
    name: (_by(kind, foreach=False, **options), {way: _by(kind, **flag, **options) for way, flag in ways.items()})
    for name, kind, options, ways in (
        ("SGD", torch.optim.SGD, {"momentum": 0.9}, {"foreach": {"foreach": True}, "fused": {"fused": True}}),
        ("AdamW", torch.optim.AdamW, {}, {"foreach": {"foreach": True}, "fused": {"fused": True}}),
        ("Adagrad", torch.optim.Adagrad, {}, {"foreach": {"foreach": True}}),
        ("RMSprop", torch.optim.RMSprop, {"momentum": 0.5}, {"foreach": {"foreach": True}}),
        ("Lion", Lion, {}, {"foreach": {"foreach": True}}),
        ("Adafactor", Adafactor, {}, {"foreach": {"foreach": True}}),
    )
}
"""By name: the optimizer in a loop over parameters, and its other implementations."""

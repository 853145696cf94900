"""Trains a model for a few steps under a tap or a check, with or without a mistake."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from field.sets import EVERY

from .building import Loss
from .data import Batch

STEPS = 2
SEED = int(os.environ.get("FIELD_SEED", "0"))  # other weights and data in the same models

Rule = Callable[[str, nn.Parameter], "dict[str, float] | None"]


def usual_groups(name: str, parameter: nn.Parameter) -> dict[str, float] | None:
    """How the optimizer treats a parameter: matrices decay, vectors do not."""
    return {"weight_decay": 0.1 if parameter.ndim > 1 else 0.0, "lr": 1e-3}


def _nothing(optimizer: Any) -> None:
    pass


@dataclass
class Training:
    """All that a run depends on. A mistake changes one of these, and draws no random numbers."""

    model: nn.Module
    batches: list[list[Batch]]
    loss: Loss
    groups: Rule = usual_groups
    adam: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., Any] = torch.optim.AdamW
    share: float = 1.0
    """The weight of a micro batch's loss in the step."""
    clip: float | None = 1.0
    clear: bool = True
    """Whether gradients are cleared before a step."""
    schedule: Callable[[int], float] = lambda step: 1.0
    """The factor of the learning rate in a step."""
    after_backward: Callable[[Any], None] = _nothing
    threads: int = 1
    mkldnn: bool = True
    autocast: torch.dtype | None = None
    compiled: str | None = None
    seed: int = 2


def training_of(family: str, attention: str = "eager", steps: int = STEPS, seed: int = SEED) -> Training:
    """Return a new model and its data, always the same for a seed."""
    made = EVERY[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = made.build(attention)
        _spread(model)
    random = torch.Generator().manual_seed(seed + 1)
    batches = [[made.batch(random) for _ in range(made.micros)] for _ in range(steps)]
    return Training(model.train(), batches, made.loss, share=1 / made.micros)


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    """Give parameters the sizes that training gives them: a new model's are so small that its layers do little.

    Norms and biases move from ones and zeros. Matrices are enlarged until their products keep the size of their inputs.
    """
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if parameter.ndim < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
                continue
            summed = 9 if isinstance(module, nn.Embedding) else _summands(module, parameter)
            if float(parameter.std()) < 1e-6:
                parameter.add_(torch.randn_like(parameter) / 3)
            parameter.mul_(max(1.0, 0.8 / (summed**0.5 * float(parameter.std()))))


def _summands(module: nn.Module, weight: nn.Parameter) -> int:
    return weight[0].numel() if hasattr(module, "kernel_size") else weight.shape[-1]


def train_under(training: Training, watch: Callable[[nn.Module, Any], Any]) -> Any:
    """Train under the tap or check that `watch(model, optimizer)` returns, and return it."""
    model = training.model
    with _settings(training):
        if training.compiled:
            model = torch.compile(model, backend=training.compiled)
        optimizer = training.optimizer(_grouped(training), **training.adam)
        rates = [group["lr"] for group in optimizer.param_groups]
        with watch(model, optimizer) as watching:
            for step, micro_batches in enumerate(training.batches):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * training.schedule(step)
                if training.clear:
                    optimizer.zero_grad()
                for batch in micro_batches:
                    (loss_of(training, model, batch) * training.share).backward()
                    training.after_backward(optimizer)
                if training.clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
                optimizer.step()
    return watching


def loss_of(training: Training, model: nn.Module, batch: Batch) -> Tensor:
    """The forward and the loss of one micro batch."""
    dtype = next(training.model.parameters()).dtype
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    with nullcontext() if training.autocast is None else torch.autocast("cpu", training.autocast):
        return training.loss(model, batch)


def _grouped(training: Training) -> list[dict[str, Any]]:
    groups: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}
    for name, parameter in training.model.named_parameters():
        if (options := training.groups(name, parameter)) is not None:
            groups.setdefault(tuple(options.items()), []).append(parameter)
    return [{"params": parameters, **dict(options)} for options, parameters in groups.items()]


@contextmanager
def _settings(training: Training) -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), torch.backends.mkldnn.flags(enabled=training.mkldnn):
        torch.manual_seed(training.seed)
        torch.set_num_threads(training.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

"""Trains a model for two steps of two micro batches under a tap, with or without a mistake."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap as tt

from .models import LENGTH, MODELS, WORDS

if TYPE_CHECKING:
    from .zoo import Mistake

STEPS, MICROS = 2, 2
SEED = int(os.environ.get("ZOO_SEED", "0"))  # other numbers in the same models: tolerances must not fit one set only
KINDS = ("input", "output", "grad_output", "param_grad", "param", "buffer")


class Batch(NamedTuple):
    inputs: Tensor
    target: Tensor


Rule = Callable[[str, nn.Parameter], "dict[str, float] | None"]


def usual_groups(name: str, parameter: nn.Parameter) -> dict[str, float] | None:
    """How the optimizer treats a parameter: matrices decay, vectors do not, routers learn slowly."""
    decay = 0.1 if parameter.ndim > 1 else 0.0
    return {"weight_decay": decay, "lr": 1e-4 if name.endswith("router.weight") else 1e-3}


@dataclass
class Training:
    """All that a run depends on. A mistake changes one of these, and draws no random numbers."""

    model: nn.Module
    batches: list[list[Batch]]
    groups: Rule = usual_groups
    adam: dict[str, Any] = field(default_factory=lambda: {"eps": 1e-8})
    share: float = 1 / MICROS
    """The weight of a micro batch's loss in the step."""
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    after_backward: Callable[[Any], None] = lambda optimizer: None
    threads: int = 1
    autocast: torch.dtype | None = None
    compiled: str | None = None


def training_of(model: str, seed: int = SEED) -> Training:
    """Return a new model and its data, always the same for a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = MODELS[model]()
    random = torch.Generator().manual_seed(seed + 1)
    return Training(built, [[_batch(model, random) for _ in range(MICROS)] for _ in range(STEPS)])


def _batch(model: str, random: torch.Generator) -> Batch:
    if "resnet" in model or model == "vision":
        return Batch(torch.randn(4, 3, 16, 16, generator=random), torch.randint(10, (4,), generator=random))
    if model == "encoder":
        tokens = torch.randint(1, WORDS, (4, LENGTH), generator=random)
        ends = torch.tensor([LENGTH, 9, 12, 0])  # the last sentence is empty: a padded batch
        tokens[torch.arange(LENGTH) >= ends[:, None]] = 0
        return Batch(tokens, torch.randint(10, (4,), generator=random))
    length = 8 if model == "recurrent" else LENGTH
    tokens = torch.randint(WORDS, (4, length + 1), generator=random)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def train(training: Training, path: Path, keep: str, kinds: tuple[str, ...] = KINDS) -> Path:
    """Train under a tap that writes to `path`."""
    train_under(training, lambda model: tt.capture(model, path, keep=keep, kinds=kinds))
    return path


def train_under(training: Training, watch: Callable[[nn.Module], Any], steps: int = STEPS) -> Any:
    """Train under the tap or check that `watch(model)` returns, and return it."""
    model = training.model
    with _training_mode(training):
        if training.compiled:
            model = torch.compile(model, backend=training.compiled)
        optimizer = torch.optim.AdamW(_grouped(training), **training.adam)
        with watch(model) as watching:
            for micro_batches in training.batches[:steps]:
                optimizer.zero_grad()
                for batch in micro_batches:
                    backward(training, model, batch)
                    training.after_backward(optimizer)
                optimizer.step()
                watching.step()
    return watching


def backward(training: Training, model: nn.Module, batch: Batch) -> None:
    """Forward, loss and backward of one micro batch."""
    with _precision(training.autocast):
        logits = model(batch.inputs)
    loss = training.loss(logits.float().flatten(0, -2), batch.target.flatten())
    (loss * training.share).backward()


def _grouped(training: Training) -> list[dict[str, Any]]:
    groups: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}
    for name, parameter in training.model.named_parameters():
        if (options := training.groups(name, parameter)) is not None:
            groups.setdefault(tuple(options.items()), []).append(parameter)
    return [{"params": parameters, **dict(options)} for options, parameters in groups.items()]


def _precision(dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


@contextmanager
def _training_mode(training: Training) -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        torch.set_num_threads(training.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def unchanged(training: Training) -> None:
    """Change nothing."""


class Runs:
    """The runs of a test session, below one folder. References are trained once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[tuple[Any, ...], Path] = {}

    def reference(
        self,
        model: str,
        keep: str,
        kinds: tuple[str, ...] = KINDS,
        common: Callable[[Training], None] = unchanged,
    ) -> Path:
        """Return the run of a model without a mistake. `common` changes the usual training."""
        spot = (model, keep, kinds, common)
        if spot not in self._made:
            training = training_of(model)
            common(training)
            self._made[spot] = self.make(training, f"reference {model}", keep, kinds)
        return self._made[spot]

    def make(self, training: Training, name: str, keep: str, kinds: tuple[str, ...] = KINDS) -> Path:
        number = sum(1 for _ in self.folder.iterdir())
        return train(training, self.folder / f"{number:03d} {name}, {keep}", keep, kinds)


def run_mistake(mistake: Mistake, runs: Runs, keep: str, elsewhere: Callable[[Training], None] = unchanged) -> Path:
    """Return the path of a run with the mistake. `elsewhere` makes further, harmless changes."""
    training = training_of(mistake.model)
    elsewhere(training)
    mistake.apply(training)
    return runs.make(training, mistake.name, keep, mistake.kinds)

"""Mistakes of moderate size beside what autocast excuses: float32 against bfloat16, where sums are rough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap as tt
from tensortap.core.records import MODULE_KINDS

Plant = Callable[["Model"], None]


class Experts(nn.Module):
    """Two experts, mixed by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        return sum(shares[..., i : i + 1] * expert(x).relu() for i, expert in enumerate(self.experts))  # type: ignore


class Norm(nn.LayerNorm):
    """A norm over 1,024 positions, whose gradients sum as many numbers of one sign."""


class Model(nn.Module):
    """Images through a convolution, overlapping pools and a norm; words through an embedding that the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 64, 3, padding=1), nn.MaxPool2d(3, 2, 1)
        self.norm, self.experts = Norm(64), Experts()
        self.words = nn.Embedding(16, 64)
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        x = self.pool(self.conv(image).relu()).flatten(2).transpose(1, 2)
        return self.head(self.experts(self.norm(x)) + self.words(words))


def built(plant: Plant | None = None) -> Model:
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.words.weight.mul_(0.2)
    if plant is not None:
        plant(model)
    return model


def train(model: Model, watch: Callable[[Any], Any], autocast: bool, clip: float = 0.01, steps: int = 2) -> Any:
    random = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(optimizer) as watching:
        for _ in range(steps):
            image = torch.randn(16, 3, 16, 16, generator=random)
            words = torch.randint(16, (16, 64), generator=random)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                scores = model(image, words)
            F.cross_entropy(scores.float().flatten(0, 1), words.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return watching


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("autocast") / "reference"
    model = built()
    train(model, lambda o: tt.capture(model, path, kinds=MODULE_KINDS, keep="tensors", optimizer=o), autocast=False)
    return path


def checked(reference: Path, plant: Plant | None = None, **options: Any) -> Any:
    model = built(plant)
    return train(model, lambda o: tt.check(model, reference, optimizer=o), autocast=True, **options).result


def scaled(name: str, factor: float) -> Plant:
    """The gradient of a parameter is too large."""

    def plant(model: Model) -> None:
        model.get_parameter(name).register_hook(lambda gradient: gradient * factor)

    return plant


class HalfNorm(Norm):
    """The bias gets the gradient of half of the batch."""

    def forward(self, input: Tensor) -> Tensor:
        normed = F.layer_norm(input, self.normalized_shape, self.weight, None, self.eps)
        first, second = normed.chunk(2)
        return torch.cat([first + self.bias, second + self.bias.detach()])


def half_of_the_batch(model: Model) -> None:
    model.norm.__class__ = HalfNorm


class HotRouter(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.1


def hot_router(model: Model) -> None:
    model.experts.router.__class__ = HotRouter


class ScaledPool(nn.MaxPool2d):
    """Sends back a gradient that is 1.2 times as large."""

    def forward(self, input: Tensor) -> Tensor:
        pooled = super().forward(input)
        return 1.2 * pooled - 0.2 * pooled.detach()


def scaled_pool(model: Model) -> None:
    model.pool.__class__ = ScaledPool


def untied(model: Model) -> None:
    model.head.weight = nn.Parameter(model.words.weight.detach().clone())


def test_autocast_itself_is_right(reference: Path) -> None:
    result = checked(reference)
    assert result.verdict == "match", result.sentence


@pytest.mark.parametrize(
    ("plant", "module", "kind"),
    [
        pytest.param(half_of_the_batch, "norm", "param_grad", id="half of the batch"),
        pytest.param(scaled("norm.weight", 1.2), "norm", "param_grad", id="norm's weight"),
        pytest.param(scaled("conv.bias", 1.2), "conv", "param_grad", id="convolution's bias"),
        pytest.param(scaled("experts.experts.0.bias", 1.2), "experts.experts.0", "param_grad", id="expert's bias"),
        pytest.param(scaled("experts.router.weight", 1.1), "experts.router", "param_grad", id="router's gradient"),
        pytest.param(hot_router, "experts.router", "output", id="router"),
        pytest.param(scaled_pool, "pool", "grad_input", id="pool"),
    ],
)
def test_a_mistake_under_autocast(reference: Path, plant: Plant, module: str, kind: str) -> None:
    result = checked(reference, plant, steps=1)
    found = {(birth.module, birth.key.kind) for birth in result.births}
    assert (module, kind) in found and {name for name, _ in found} == {module}, result.sentence


def test_a_parameter_that_is_no_longer_tied(reference: Path) -> None:
    result = checked(reference, untied, steps=1)
    assert result.verdict == "diverged" and result.births[0].module in ("words", "head"), result.sentence


@pytest.mark.parametrize(("clip", "verdict"), [(0.01, "match"), (0.008, "diverged")])
def test_gradients_clipped_to_another_norm(reference: Path, tmp_path: Path, clip: float, verdict: str) -> None:
    """A check of modules does not compare what the optimizer gets: two runs do."""
    model, path = built(), tmp_path / "run"
    train(model, lambda o: tt.capture(model, path, kinds=MODULE_KINDS, optimizer=o), autocast=True, clip=clip, steps=1)
    result = tt.compare(reference, path, steps=(0, 0))
    assert result.verdict == verdict, result.sentence
    assert verdict == "match" or result.births[0].key.kind == "step_grad", result.sentence

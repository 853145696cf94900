"""Rounding that no record shows: layers that share one record, short dtypes inside code, what a loss cancels out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap as tt
from tensortap.compare.judge.rules import unseen
from tensortap.core.records import Comparison

_KEEP = pytest.mark.parametrize("keep", ["summary", "tensors"])
_EPSILON = 2.0**-23


def moved(x: Tensor, seed: int, by: float) -> Tensor:
    """Return numbers moved by a share of themselves, up or down at random, as by another kernel."""
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return x * (1 + by * signs)


class _Moved(torch.autograd.Function):
    """Passes a parameter on; its gradient is moved as by another order of sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: int, by: float) -> Tensor:
        ctx.seed, ctx.by = seed, by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return moved(gradients[0], ctx.seed, ctx.by), None, None


def recorded(
    build: Callable[[], nn.Module],
    keep: str,
    loss: Callable[[Tensor], Tensor] = lambda y: y.float().square().mean(),
    autocast: bool = False,
    kinds: tuple[str, ...] = ("input", "output", "grad_output", "param_grad", "buffer"),
) -> Any:
    torch.manual_seed(0)
    model, x = build(), torch.randn(16, 32)
    with (
        tt.capture(model, keep=keep, kinds=kinds) as tap,
        torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(),
    ):
        y = model(x)
        with torch.autocast("cpu", enabled=False):
            loss(y).backward()
    return tap.run


def rules_of(found: Comparison) -> set[str]:
    return set(found.table.column("rule").to_pylist())


class OneRecord(nn.Module):
    """Calls its layers so that no hook sees them, as in one graph of a compiler. Each kernel rounds in its own way."""

    def __init__(self, seed: int, by: float = 8 * _EPSILON, norms: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) if norms else nn.LayerNorm(32) for _ in range(8))
        self.seed, self.by = seed, by

    def forward(self, x: Tensor) -> Tensor:
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = moved(torch.tanh(norm.forward(layer.forward(x))), 10 * self.seed + number, self.by)
        return x


@_KEEP
def test_each_norm_over_the_batch_that_shares_a_record_adds_its_rounding(keep: str) -> None:
    reference, candidate = (recorded(lambda seed=seed: OneRecord(seed), keep) for seed in (1, 2))
    found = tt.compare(reference, candidate)
    assert found.verdict == "match", found.sentence
    assert unseen.STATISTICS_INSIDE in rules_of(found)
    wrong = tt.compare(reference, recorded(lambda: OneRecord(2, by=2000 * _EPSILON), keep))
    assert wrong.first is not None and wrong.first.module == "", wrong.sentence


@_KEEP
def test_layers_without_batch_statistics_get_no_more(keep: str) -> None:
    reference, candidate = (recorded(lambda seed=seed: OneRecord(seed, norms=False), keep) for seed in (1, 2))
    assert tt.compare(reference, candidate).verdict == "diverged"


class OneGraphWithKinks(nn.Module):
    """One of its activations is next to zero, on one side or on the other."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.last, self.seed = nn.Linear(32, 64), nn.Linear(64, 8), seed

    def forward(self, x: Tensor) -> Tensor:
        h = self.first.forward(x)
        there = torch.zeros_like(h)
        there[0, 0] = 1.0
        h = h * (1 - there) + there * (h - h.detach() + 1e-7 * (-1) ** self.seed)
        return self.last.forward(torch.relu(h))


@_KEEP
def test_gradients_behind_kinks_that_no_record_shows_are_not_judged(keep: str) -> None:
    reference, candidate = (recorded(lambda seed=seed: OneGraphWithKinks(seed), keep) for seed in (1, 2))
    found = tt.compare(reference, candidate)
    assert found.first is None, found.sentence
    assert unseen.KINKS_INSIDE in rules_of(found)
    assert any(unseen.KINKS_INSIDE in note for note in found.notes)
    wrong = tt.compare(reference, recorded(lambda: OneGraphWithKinks(2), keep, lambda y: (2 * y).square().mean()))
    assert wrong.verdict == "diverged"


class Cell(nn.Module):
    """Multiplies by the matrices of modules that it does not call, and keeps its state in float32."""

    def __init__(self, factor: float = 1.0, joined: bool = False) -> None:
        super().__init__()
        self.given, self.state, self.factor, self.joined = nn.Linear(32, 32), nn.Linear(32, 32), factor, joined

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for part in (x, x.roll(1, 0), x.roll(2, 0)):
            if self.joined:
                weights = torch.cat([self.given.weight, self.state.weight], 1)
                made = F.linear(torch.cat([part, h], -1), weights, self.given.bias + self.state.bias)
            else:
                made = self.given.weight @ part.T
                made = made.T + self.given.bias + F.linear(h, self.state.weight, self.state.bias)
            h = h + torch.tanh(made).float() * self.factor
        return h


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.cell, self.head = Cell(**options), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.cell(x))
        return made


@_KEEP
def test_code_may_multiply_in_a_short_dtype_and_return_none(keep: str) -> None:
    reference, candidate = (recorded(Recurrent, keep, autocast=short) for short in (False, True))
    found = tt.compare(reference, candidate)
    assert found.verdict == "match", found.sentence
    assert unseen.UNSEEN_PRODUCT in rules_of(found)
    wrong = tt.compare(reference, recorded(lambda: Recurrent(factor=1.1), keep, autocast=True))
    assert wrong.first is not None and wrong.first.module == "cell", wrong.sentence


@_KEEP
def test_other_roundings_inside_short_code_are_not_judged_and_a_factor_is_wrong(keep: str) -> None:
    reference = recorded(Recurrent, keep, autocast=True)
    found = tt.compare(reference, recorded(lambda: Recurrent(joined=True), keep, autocast=True))
    assert found.verdict == "incomparable", found.sentence
    assert unseen.SHORT_INSIDE in rules_of(found)
    assert any(unseen.SHORT_INSIDE in note for note in found.notes)
    wrong = tt.compare(reference, recorded(lambda: Recurrent(factor=1.005), keep, autocast=True))
    assert wrong.first is not None and wrong.first.module == "cell", wrong.sentence


class Product(nn.Module):
    """A Linear under autocast, whose kernel rounds the gradient of its weight as often as it likes."""

    def __init__(self, by: float = 0.0) -> None:
        super().__init__()
        self.weight, self.by = nn.Parameter(torch.randn(32, 32) / 6), by

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, _Moved.apply(self.weight, 1, self.by))


@_KEEP
def test_a_product_of_short_numbers_is_rounded_to_their_dtype(keep: str) -> None:
    def build(by: float) -> nn.Module:
        return nn.Sequential(Product(), Product(by))

    reference, candidate = (recorded(lambda by=by: build(by), keep, autocast=True) for by in (0.0, 5e-3))
    found = tt.compare(reference, candidate)
    assert found.verdict == "match", found.sentence
    assert unseen.SHORT_PRODUCT in rules_of(found)
    wrong = tt.compare(reference, recorded(lambda: build(2e-2), keep, autocast=True))
    assert wrong.first is not None and wrong.first.module == "1", wrong.sentence


class Tied(nn.Module):
    """Words come from the matrix by which logits are made."""

    def __init__(self, by: float = 0.0) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(32, 32), nn.LayerNorm(32), Product(by)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))


def test_a_tied_parameter_has_the_short_products_of_all_that_use_it() -> None:
    def train(by: float, watch: Callable[[nn.Module], Any]) -> Any:
        torch.manual_seed(0)
        model, tokens = Tied(by), torch.randint(32, (4, 16))
        with watch(model) as watching, torch.autocast("cpu", torch.bfloat16):
            F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        return watching

    kinds = ("input", "output", "grad_output", "grad_input", "param_grad")
    run = train(0.0, lambda model: tt.capture(model, keep="tensors", kinds=kinds)).run
    right = train(5e-3, lambda model: tt.check(model, run)).result
    assert right.verdict == "match", right.sentence
    assert any(row["rule"] == unseen.SHORT_PRODUCT for row in right.rows)
    wrong = train(2e-2, lambda model: tt.check(model, run)).result
    assert wrong.first is not None and wrong.first.module in ("embed", "head"), wrong.sentence


class Scan(nn.Module):
    """A container with a parameter of its own, whose gradient sums over time and over positions."""

    def __init__(self, by: float = 0.0) -> None:
        super().__init__()
        self.given, self.decay, self.by = nn.Linear(32, 32), nn.Parameter(torch.rand(32, 4)), by

    def forward(self, x: Tensor) -> Tensor:
        decay = _Moved.apply(self.decay, 1, self.by)
        return (self.given(x)[..., None] * torch.exp(-decay)).sum(-1)


@_KEEP
def test_own_code_sums_several_times(keep: str) -> None:
    reference, candidate = (recorded(lambda by=by: Scan(by), keep) for by in (0.0, 100 * _EPSILON))
    found = tt.compare(reference, candidate)
    assert found.verdict == "match", found.sentence
    assert unseen.OWN_SUMS in rules_of(found)
    wrong = tt.compare(reference, recorded(lambda: Scan(1000 * _EPSILON), keep))
    assert wrong.first is not None and wrong.first.key.path == "decay", wrong.sentence


class Sure(nn.Module):
    """Its scores leave little doubt about the class of any row."""

    def __init__(self, one_record: bool = False) -> None:
        super().__init__()
        self.linear, self.one_record = nn.Linear(32, 4), one_record

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.linear.forward if self.one_record else self.linear)(x)
        return scores + 14 * F.one_hot(torch.arange(16) % 4, 4)


def by_torch(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, torch.arange(16) % 4)


def by_hand(scores: Tensor) -> Tensor:
    return (scores.exp().sum(-1).log() - scores[torch.arange(16), torch.arange(16) % 4]).mean()


def smoothed(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, torch.arange(16) % 4, label_smoothing=0.1)


@pytest.mark.parametrize("kinds", [("output", "grad_output", "param_grad"), ("input", "output", "param_grad")])
@pytest.mark.parametrize("one_record", [False, True])
@_KEEP
def test_little_is_left_of_a_loss_whose_targets_are_met(keep: str, one_record: bool, kinds: tuple[str, ...]) -> None:
    def run(loss: Callable[[Tensor], Tensor]) -> Any:
        return recorded(lambda: Sure(one_record), keep, loss, kinds=kinds)

    reference = run(by_torch)
    found = tt.compare(reference, run(by_hand))
    assert found.verdict == "match", found.sentence
    assert unseen.CANCELLED_LOSS in rules_of(found)
    assert tt.compare(reference, run(smoothed)).verdict == "diverged"


class Averaged(nn.Module):
    """A running mean of numbers that nearly cancel out, and that are all off by the same."""

    def __init__(self, off: float = 0.0, momentum: float = 0.1) -> None:
        super().__init__()
        self.given, self.norm, self.off = nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32, momentum=momentum), off
        self.shift = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.given(x)
        made: Tensor = self.norm(self.shift(torch.cat([x, -x]) + 1e-3 + self.off))
        return made


@_KEEP
def test_a_mean_is_off_by_what_its_numbers_are_off_by(keep: str) -> None:
    reference, candidate = (recorded(lambda off=off: Averaged(off), keep) for off in (0.0, 8e-7))
    found = tt.compare(reference, candidate)
    assert found.verdict == "match", found.sentence
    assert "error of the numbers that it averages" in rules_of(found)
    wrong = tt.compare(reference, recorded(lambda: Averaged(8e-7, momentum=0.11), keep))
    assert wrong.first is not None and wrong.first.module == "norm", wrong.sentence


class Apart(nn.Module):
    """Its own code sends back what is left of a difference of what two modules return."""

    def __init__(self, by: float, factor: float) -> None:
        super().__init__()
        self.one, self.other, self.by, self.factor = nn.Linear(32, 32), nn.Identity(), by, factor

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        other = self.other(moved(one.detach() * 1.1, 1, self.by))
        apart = one - other
        made = 1e4 * (apart.square().mean() + (self.factor - 1) * apart.mean())
        return made - made.detach() + 100  # the same number on both sides: it does not show how far off these are


@_KEEP
def test_the_backward_of_own_code_multiplies_by_what_modules_return(keep: str) -> None:
    def run(by: float, factor: float = 1.0) -> Any:
        return recorded(lambda: Apart(by, factor), keep, loss=lambda y: y)

    reference = run(0.0)
    found = tt.compare(reference, run(4 * _EPSILON))
    assert found.verdict == "match", found.sentence
    assert unseen.READ_BY_CODE in rules_of(found)
    wrong = tt.compare(reference, run(4 * _EPSILON, 1.01))
    assert wrong.first is not None and wrong.first.module == "", wrong.sentence


@_KEEP
def test_products_of_several_calls_are_rounded_beside_measured_noise(keep: str, tmp_path: Path) -> None:
    class Repeated(nn.Module):
        def __init__(self, by: float = 0.0) -> None:
            super().__init__()
            self.product = Product(by)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = torch.tanh(self.product(x)).to(x.dtype)
            return x

    def step(model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(16, 32, generator=torch.Generator().manual_seed(0))).float().square().mean().backward()

    def run(by: float) -> Any:
        torch.manual_seed(0)
        with tt.capture(model := Repeated(by), keep=keep) as tap:
            step(model)
        return tap.run

    torch.manual_seed(0)
    noise = tt.noise(Repeated(), step, tmp_path / "noise")
    assert tt.compare(run(0.0), run(7e-3), noise=noise).verdict == "match"
    assert tt.compare(run(0.0), run(3e-2), noise=noise).verdict == "diverged"

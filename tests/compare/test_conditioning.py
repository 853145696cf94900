"""Errors that a right module enlarges: small rows, gradients that cancel out, means and sums that are nearly zero."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from made_runs import Seen, values, write
from torch import Tensor, nn

import tensortap as tt

_WIDTH, _ROWS = 32, 24
_KINDS = ("input", "output", "grad_input", "grad_output", "param_grad", "buffer")


class _Rounded(nn.Module):
    """Returns its input, moved by a rounding of a dtype, as another kernel may."""

    def __init__(self, seed: int, epsilon: float) -> None:
        super().__init__()
        self.seed, self.epsilon = seed, epsilon

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(self.seed))
        moved = (drawn < 0.1).float() - (drawn > 0.9).float()  # few elements round otherwise
        return (x.float() * (1 + self.epsilon * moved)).to(x.dtype)


class _Residual(nn.Module):
    """A norm over the sum of large rows, small rows, and a branch that computes in a short dtype."""

    def __init__(self, seed: int, factor: float = 1.0) -> None:
        super().__init__()
        self.kernel, self.norm = _Rounded(seed, 2.0**-8), nn.LayerNorm(_WIDTH)
        self.branch, self.factor = nn.Linear(_WIDTH, _WIDTH), factor

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = self.kernel(self.branch(x))
        return self.norm(1000 * x * (torch.arange(_ROWS) > 4)[:, None] + made.float()) * self.factor


class _Normed(nn.Module):
    """Its loss hardly depends on more than the mean and the size of a norm's output, which are fixed."""

    def __init__(self, seed: int, factor: float = 1.0) -> None:
        super().__init__()
        self.linear, self.kernel, self.norm = nn.Linear(_WIDTH, _WIDTH), _Rounded(seed, 2.0**-8), nn.LayerNorm(_WIDTH)
        self.norm.bfloat16()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.kernel(self.linear(x).bfloat16())).float() * self.factor


class _Centered(nn.Module):
    """A running mean of numbers whose mean is zero."""

    def __init__(self, seed: int, factor: float = 1.0) -> None:
        super().__init__()
        self.kernel, self.norm, self.factor = _Rounded(seed, 2.0**-23), nn.BatchNorm1d(_WIDTH), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.kernel(torch.cat([x, -x]))) * self.factor


class _Token(nn.Module):
    """A token that all rows share, and whose gradients cancel out between these."""

    def __init__(self, seed: int, factor: float = 1.0) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, _WIDTH))
        self.kernel, self.linear, self.factor = _Rounded(seed, 2.0**-23), nn.Linear(_WIDTH, _WIDTH), factor

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(_ROWS, 1, _WIDTH), x[:, None]], 1)
        signs = torch.where(torch.arange(_ROWS) % 2 == 0, 1.0, -1.0)
        return self.linear(self.kernel(tokens)) * signs[:, None, None] * self.factor


class _Pooled(nn.Module):
    """Returns the mean of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0, keepdim=True).expand_as(x)


class _Deviation(nn.Module):
    """What it sends back is the difference of two gradients, which are about the same in all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = _Pooled()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x) - x


class _Mixed(nn.Module):
    def __init__(self, seed: int, factor: float = 1.0) -> None:
        super().__init__()
        self.linear, self.mixer, self.kernel = nn.Linear(_WIDTH, _WIDTH), _Deviation(), _Rounded(seed, 2.0**-23)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(self.mixer(self.linear(x)) * 1e-3 + 10) * self.factor


class _Crossing(nn.Module):
    """Returns its input, with an element on one side of zero or on the other."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        there = torch.zeros_like(x)
        there[0, 0] = 1.0
        return x * (1 - there) + there * (x - x.detach() + 1e-7 * (-1) ** self.seed)


class _Dense(nn.Module):
    """A layer that joins what it is given."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm, self.kink, self.act = nn.LayerNorm(2 * _WIDTH), _Crossing(seed), nn.ReLU()
        self.linear = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, parts: list[Tensor]) -> Tensor:
        return self.linear(self.act(self.kink(self.norm(torch.cat(parts, -1)))))


class _Joined(nn.Module):
    """Two layers use what the first makes, and the gradient that one of them sends back jumps at a kink."""

    def __init__(self, seed: int, factor: float = 1.0) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(_WIDTH, _WIDTH), _Dense(seed), nn.Linear(_WIDTH, _WIDTH)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        return (self.layer([x, made]) + self.last(made)) * self.factor


def record(path: Path, build: Callable[..., nn.Module], seed: int, keep: str, factor: float = 1.0) -> Path:
    torch.manual_seed(0)
    model = build(seed, factor)
    x = torch.randn(_ROWS, _WIDTH)
    with tt.capture(model, path, keep=keep, kinds=_KINDS):
        y = model(x)
        (y.sum() / 100 if build is _Token else (y - 0.3).square().mean()).backward()
    return path


@pytest.mark.parametrize("keep", ["summary", "tensors"])
@pytest.mark.parametrize("build", [_Residual, _Normed, _Centered, _Token, _Mixed, _Joined])
def test_what_a_right_module_enlarges_is_no_divergence(
    build: Callable[..., nn.Module], keep: str, tmp_path: Path
) -> None:
    reference, candidate = (record(tmp_path / str(seed), build, seed, keep) for seed in (1, 2))
    found = tt.compare(reference, candidate)
    assert found.first is None, found.sentence
    wrong = tt.compare(reference, record(tmp_path / "wrong", build, 2, keep, factor=1.3))
    assert wrong.first is not None and wrong.first.module == "", wrong.sentence


def score(path: Path, size: float, off: float = 0.0) -> Path:
    """A layer that makes one number of each row, in which products cancel out if it is small."""
    x, weight, scores = values(1, (14, 24)), values(2, (1, 24)), values(3, (14, 1)) * np.float32(size)
    moved = scores * np.float32(1) + values(4, (14, 1)) * np.float32(off * size)
    x = x * np.float32(1 + bool(off) * 2**-21)
    seen = [Seen("score", weight, "param", path="weight"), Seen("score", x, "input"), Seen("score", moved)]
    return write(path, seen)


@pytest.mark.parametrize(
    ("size", "off", "verdict"), [(0.5, 2e-5, "match"), (5.0, 2e-5, "diverged"), (0.5, 1e-3, "diverged")]
)
def test_a_product_that_cancels_out_is_further_off(size: float, off: float, verdict: str, tmp_path: Path) -> None:
    found = tt.compare(score(tmp_path / "a", size), score(tmp_path / "b", size, off))
    assert found.verdict == verdict, found.sentence


def determinant(path: Path, repeated: bool, off: float = 0.0) -> Path:
    """The logarithm of a determinant near 1, for each row."""
    made = np.full(64, 1e-2 * (1 + off), np.float32) if repeated else values(3, (64,)) * np.float32(1e-2 * (1 + off))
    seen = [Seen("mixing", values(2, (6, 6)), "param", path="weight"), Seen("mixing", values(1, (64, 6)), "input")]
    return write(path, [*seen, Seen("mixing", made, cls="Mixing")])


@pytest.mark.parametrize(
    ("repeated", "off", "verdict"), [(True, 2e-5, "match"), (False, 2e-5, "diverged"), (True, 1e-2, "diverged")]
)
def test_one_number_made_of_many_may_be_what_is_left_of_them(
    repeated: bool, off: float, verdict: str, tmp_path: Path
) -> None:
    found = tt.compare(determinant(tmp_path / "a", repeated), determinant(tmp_path / "b", repeated, off))
    assert found.verdict == verdict, found.sentence


class _Bank(nn.Module):
    """Keeps what a module inside made, as a memory of negative examples."""

    bank: Tensor

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.linear, self.momentum = nn.Linear(_WIDTH, _WIDTH), momentum
        self.register_buffer("bank", torch.randn(_ROWS, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).float()
        self.bank = torch.lerp(self.bank, y.detach(), self.momentum)
        return y


def banked(path: Path, autocast: bool, momentum: float = 1.0) -> Path:
    torch.manual_seed(0)
    model, x = _Bank(momentum), torch.randn(_ROWS, _WIDTH)
    kinds = ("input", "output", "grad_output", "param_grad", "buffer")
    with tt.capture(model, path, kinds=kinds), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(x).sum().backward()
    return path


def test_a_buffer_is_made_from_what_modules_inside_return(tmp_path: Path) -> None:
    reference = banked(tmp_path / "a", autocast=False)
    found = tt.compare(reference, banked(tmp_path / "b", autocast=True))
    assert found.verdict == "match", found.sentence
    wrong = tt.compare(reference, banked(tmp_path / "c", autocast=False, momentum=0.9))
    assert wrong.first is not None and wrong.first.cause == "buffer", wrong.sentence

"""Gradients of biases that cancel out: they have the rounding of their terms, in the coarser dtype, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from made_runs import Seen, values, write
from torch import nn

import tensortap as tt
from tensortap.core.records import Comparison

DEFAULT = ("input", "output", "grad_output", "param_grad")
WITHOUT = ("input", "output", "param_grad")
ALL = (*DEFAULT, "grad_input")


class OtherOrder(nn.Linear):
    """The same sum in two halves."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        half = self.in_features // 2
        first = nn.functional.linear(input[..., :half], self.weight[:, :half])
        return first + nn.functional.linear(input[..., half:], self.weight[:, half:], self.bias)


class Attention(nn.Module):
    """The bias of the keys moves all scores of a query alike, which a softmax does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4
        return x + torch.softmax(scores, -1) @ self.value(x)


class Model(nn.Module):
    """A convolution with a bias before a norm, then attention over its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.attention, self.head = Attention(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        return self.head(self.attention(y).mean(1))


def model_of(other_order: bool) -> Model:
    torch.manual_seed(0)
    model = Model()
    for module in model.modules():
        if other_order and type(module) is nn.Linear:
            module.__class__ = OtherOrder
    return model


def step(model: nn.Module, mixed: bool) -> None:
    x = torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = model(x).float().square().sum()
    loss.backward()


def captured(path: Path, mixed: bool, kinds: tuple[str, ...], keep: str, other_order: bool = False) -> Path:
    model = model_of(other_order)
    with tt.capture(model, path, kinds=kinds, keep=keep):
        step(model, mixed)
    return path


BIASES = {("conv", "bias"), ("attention.key", "bias")}


@pytest.mark.parametrize("keep", ["tensors", "summary"])
@pytest.mark.parametrize("kinds", [DEFAULT, WITHOUT], ids=["default", "without grad_output"])
@pytest.mark.parametrize(
    "mixed",
    [(True, True), (False, True), (True, False), (False, False)],
    ids=["both", "candidate", "reference", "none"],
)
def test_a_bias_whose_gradient_is_zero_in_theory(
    tmp_path: Path, mixed: tuple[bool, bool], kinds: tuple[str, ...], keep: str
) -> None:
    ours = captured(tmp_path / "a", mixed[0], kinds, keep)
    result = tt.compare(ours, captured(tmp_path / "b", mixed[1], kinds, keep, other_order=True))
    assert result.verdict == "match", result.sentence
    rows = [row for row in result.rows if (row["module"], row["path"]) in BIASES and row["kind"] == "param_grad"]
    assert any(row["rel_l2"] > 0.1 for row in rows), "nothing cancelled out"


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("mixed", [True, False], ids=["autocast", "float32"])
def test_a_check_of_it(tmp_path: Path, mixed: bool, isolate: bool) -> None:
    """Under autocast, against a reference without it."""
    reference = captured(tmp_path / "a", False, ALL, "tensors")
    model = model_of(other_order=True)
    with tt.check(model, reference, isolate=isolate) as check:
        step(model, mixed)
    wrong = {(birth.key.module, birth.key.path) for birth in check.result.births}
    assert not wrong & BIASES, check.result.sentence


@pytest.mark.parametrize("kinds", [DEFAULT, WITHOUT], ids=["default", "without grad_output"])
@pytest.mark.parametrize("module", ["attention.value", "head"])
def test_a_bias_that_gets_a_wrong_gradient_under_autocast(tmp_path: Path, kinds: tuple[str, ...], module: str) -> None:
    captured(tmp_path / "a", True, kinds, "tensors")
    model = model_of(other_order=True)
    bias = model.get_submodule(module).bias
    assert isinstance(bias, torch.Tensor)
    with tt.capture(model, tmp_path / "b", kinds=kinds, keep="tensors"):
        bias.register_hook(lambda gradient: gradient * 1.5)
        step(model, True)
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.first is not None
    assert (result.first.key.module, result.first.key.kind, result.first.key.path) == (module, "param_grad", "bias")


# --- by hand ------------------------------------------------------------------------------------------------------
def linear(gradient: Any, *, given: Any = np.float32, known: bool = True, scale: float = 1.0) -> list[Seen]:
    """A linear module of 256 positions, and the gradient of its bias; that at its output has a dtype of its own."""
    seen = [
        Seen("fc", values(1, (256, 8)), "input"),
        Seen("fc", values(2, (256, 8)).astype(given)),
        Seen("fc", (np.float32(scale) * values(3, (256, 8))).astype(given), "grad_output"),
        Seen("fc", np.float32(scale) * values(4, (8, 8)) * 16, "param_grad", path="weight"),
        Seen("fc", gradient, "param_grad", path="bias"),
    ]
    return seen if known else [each for each in seen if each.kind != "grad_output"]


def compared(tmp_path: Path, ours: list[Seen], theirs: list[Seen]) -> Comparison:
    return tt.compare(write(tmp_path / "a", ours), write(tmp_path / "b", theirs))


ZERO = np.zeros(8, np.float32)
SMALL = values(5, (8,)) * np.float32(1e-7)


@pytest.mark.parametrize("known", [True, False], ids=["grad_output", "no grad_output"])
@pytest.mark.parametrize(
    ("reference", "off", "dtype", "verdict"),
    [
        (SMALL, 1e-5, np.float32, "match"),  # of numbers of size 45
        (SMALL, 1e-2, np.float32, "diverged"),
        (SMALL, 1e-2, ml_dtypes.bfloat16, "match"),
        (SMALL, 20.0, ml_dtypes.bfloat16, "diverged"),
        (ZERO, 1e-5, np.float32, "match"),
        (ZERO, 20.0, np.float32, "diverged"),
        (ZERO, 1e-2, ml_dtypes.bfloat16, "match"),
        (ZERO, 20.0, ml_dtypes.bfloat16, "diverged"),
    ],
)
def test_a_cancelled_sum_is_allowed_the_rounding_of_its_terms(
    tmp_path: Path, reference: Any, off: float, dtype: Any, verdict: str, known: bool
) -> None:
    candidate = reference + values(6, (8,)) * np.float32(off / 8**0.5)
    options = {"given": dtype, "known": known}
    result = compared(tmp_path, linear(reference, **options), linear(candidate, **options))
    assert result.verdict == verdict, result.sentence


def sums_of_one_sign(off: float) -> list[Seen]:
    """A norm whose bias sums 1,024 bfloat16 numbers, most of one sign; its gradient is off by a share."""
    given = (values(1, (1024, 8)) + np.float32(0.4)).astype(ml_dtypes.bfloat16)
    bias = given.astype(np.float32).sum(0)
    apart = values(2, (8,))
    apart *= np.float32(off * np.linalg.norm(bias) / np.linalg.norm(apart))
    return [Seen("norm", given, "grad_output"), Seen("norm", bias + apart, "param_grad", path="bias")]


@pytest.mark.parametrize(("off", "status"), [(0.28, "unjudged"), (0.5, "diverged")])
def test_a_sum_of_short_numbers_that_a_naive_kernel_rounds_is_unjudged(tmp_path: Path, off: float, status: str) -> None:
    result = compared(tmp_path, sums_of_one_sign(0.0), sums_of_one_sign(off))
    assert [row["status"] for row in result.rows if row["kind"] == "param_grad"] == [status], result.sentence
    assert any("rounded after each" in note for note in result.notes) == (status == "unjudged")


def sums_of_random_signs(off: float) -> list[Seen]:
    """The same with random signs, in an order that is not known: runs of one sign may cancel each other."""
    given = values(1, (256, 8)).astype(ml_dtypes.bfloat16)
    bias, apart = given.astype(np.float32).sum(0), values(2, (8,))
    apart *= np.float32(off * np.linalg.norm(bias) / np.linalg.norm(apart))
    return [Seen("norm", given, "grad_output"), Seen("norm", bias + apart, "param_grad", path="bias")]


@pytest.mark.parametrize(("off", "status"), [(0.03, "close"), (0.15, "unjudged"), (0.5, "diverged")])
def test_partial_sums_may_be_larger_than_the_sum(tmp_path: Path, off: float, status: str) -> None:
    result = compared(tmp_path, sums_of_random_signs(0.0), sums_of_random_signs(off))
    assert [row["status"] for row in result.rows if row["kind"] == "param_grad"] == [status], result.sentence


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_sum_that_does_not_cancel_out_is_not_allowed_its_terms(tmp_path: Path, dtype: Any) -> None:
    """A quarter of them is missing."""
    bias = values(3, (256, 8)).sum(0)
    result = compared(tmp_path, linear(bias, given=dtype), linear(bias * np.float32(0.65), given=dtype))
    assert result.first is not None and result.first.key.path == "bias", result.sentence


def test_a_gradient_alone_is_not_known_to_cancel_out(tmp_path: Path) -> None:
    """Neither its terms nor the weight's gradient show how small it is."""
    runs = [linear(values(seed, (8,)) * np.float32(1e-7))[2:] for seed in (5, 6)]
    assert compared(tmp_path, *runs).verdict == "match"
    assert compared(tmp_path / "alone", *(run[-1:] for run in runs)).verdict == "diverged"


@pytest.mark.parametrize(("size", "status"), [(1e-9, "close"), (1e-5, "diverged")])
def test_a_gradient_that_is_zero_in_theory(tmp_path: Path, size: float, status: str) -> None:
    """Under a softmax over equal values nothing depends on the keys: what is sent to them is rounding."""

    def run(name: str, number: int) -> Path:
        x, noise = values(1, (8, 16)), np.float32(size) * values(number, (8, 16))
        forward = [Seen("block", x, "input"), Seen("block.key", x, "input"), Seen("block.key", values(2, (8, 16)))]
        given = [Seen("block", values(3, (8, 16))), Seen("block", values(4, (8, 16)), "grad_output")]
        made = [Seen("block.key", noise, "grad_output"), Seen("block.key", noise @ values(5, (16, 16)), "grad_input")]
        return write(tmp_path / name, [*forward, *given, *made, Seen("block.key", x.T @ noise, "param_grad", path="w")])

    result = tt.compare(run("a", 6), run("b", 7))
    assert {row["status"] for row in result.rows if row["module"] == "block.key" and "grad" in row["kind"]} == {status}
    assert result.verdict == ("match" if status == "close" else "diverged"), result.sentence


class WithLoss(nn.Module):
    """Returns its loss: the gradient of that single number is larger than the gradient at each of many outputs."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.head, self.smoothing = nn.Linear(16, 50), smoothing

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x).float(), y, label_smoothing=self.smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_of_a_loss_cancels_nothing(smoothing: float, tmp_path: Path) -> None:
    x, y = torch.randn(200, 16, generator=torch.Generator().manual_seed(1)), torch.arange(200) % 50
    for name in ("reference", "candidate"):
        torch.manual_seed(0)
        model = WithLoss(smoothing if name == "candidate" else 0.0)
        with tt.capture(model, tmp_path / name, keep="tensors", kinds=ALL), torch.autocast("cpu", torch.bfloat16):
            model(x, y).backward()
    result = tt.compare(tmp_path / "reference", tmp_path / "candidate")
    if smoothing:
        assert result.first is not None and result.first.module == ""
    else:
        assert result.verdict == "match"

"""A gradient scaler on one side multiplies all gradients until the optimizer uses them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import paddle
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import nn

import tensortap as tt

_KEEP = pytest.mark.parametrize("keep", ["summary", "tensors"])
KINDS = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "step_grad")


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scale: float,
    dtype: torch.dtype = torch.float32,
    mistake: str = "",
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
    for seed in range(2):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss = F.cross_entropy(model(x).float(), torch.arange(24) % 4)
        scaled = scaler.scale(loss)
        (loss if mistake == "not scaled" else scaled).backward()
        if mistake != "not unscaled":
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def recorded(keep: str, scale: float = 1.0, dtype: torch.dtype = torch.float32, mistake: str = "") -> Any:
    model, optimizer = build()
    with tt.capture(model, keep=keep, kinds=KINDS, optimizer=optimizer) as tap:
        train(model, optimizer, scale, dtype, mistake)
    return tap.run


def checked(reference: Any, scale: float, dtype: torch.dtype = torch.float32, mistake: str = "", **options: Any) -> Any:
    model, optimizer = build()
    with tt.check(model, reference, optimizer=optimizer, **options) as check:
        train(model, optimizer, scale, dtype, mistake)
    return check.result


@_KEEP
def test_gradients_between_scaling_and_unscaling_are_compared_at_one_scale(keep: str) -> None:
    plain, scaled = recorded(keep), recorded(keep, 1024.0)
    for sides in ((plain, scaled), (scaled, plain), (scaled, recorded(keep, 256.0))):
        found = tt.compare(*sides)
        assert found.verdict == "match", found.sentence
        assert any("the gradient scaler's scale is" in note for note in found.notes), found.notes


@_KEEP
def test_float16_with_a_scaler_matches_float32(keep: str) -> None:
    for sides in ((1.0, torch.float32), (4096.0, torch.float16)), ((4096.0, torch.float16), (1.0, torch.float32)):
        found = tt.compare(*(recorded(keep, *side) for side in sides))
        assert found.verdict == "match", found.sentence


@_KEEP
@pytest.mark.parametrize("mistake", ["not scaled", "not unscaled"])
def test_a_scaler_that_is_used_halfway_is_found(keep: str, mistake: str) -> None:
    found = tt.compare(recorded(keep), recorded(keep, 1024.0, mistake=mistake))
    assert found.first is not None, found.sentence
    assert found.first.key.kind == ("grad_output" if mistake == "not scaled" else "step_grad"), found.sentence


_ISOLATED = pytest.mark.parametrize("isolate", [True, False])


@_ISOLATED
def test_a_check_compares_scaled_gradients_at_the_scale_of_the_reference(isolate: bool) -> None:
    for scales in (1.0, 1024.0), (1024.0, 1.0), (1024.0, 256.0):
        found = checked(recorded("tensors", scales[0]), scales[1], isolate=isolate)
        assert found.verdict == "match", found.sentence


@_ISOLATED
def test_a_check_in_float16_with_a_scaler_matches_float32(isolate: bool) -> None:
    half = 4096.0, torch.float16
    assert checked(recorded("tensors"), *half, isolate=isolate).verdict == "match"
    assert checked(recorded("tensors", *half), 1.0, isolate=isolate).verdict == "match"


@_ISOLATED
@pytest.mark.parametrize("mistake", ["not scaled", "not unscaled"])
def test_a_check_finds_a_scaler_that_is_used_halfway(isolate: bool, mistake: str) -> None:
    """A loss that goes back as it is has gradients as large as the reference's, until they are unscaled."""
    found = checked(recorded("tensors"), 1024.0, mistake=mistake, isolate=isolate)
    assert found.first is not None and found.first.key.kind == "step_grad", found.sentence


def test_the_truth_of_scaled_gradients_is_that_of_the_reference() -> None:
    found = checked(recorded("tensors"), 1024.0, truth="float64")
    assert found.verdict == "match", found.sentence
    half = checked(recorded("tensors"), 4096.0, torch.bfloat16, truth="float64")
    assert half.verdict == "imprecise", half.sentence


@_ISOLATED
@pytest.mark.parametrize("order", ["before", "after", "between"])
def test_the_scaler_of_another_model_is_not_that_of_the_checked_one(isolate: bool, order: str) -> None:
    """A loss has the scale of the scaler that multiplied it, whichever came last."""
    reference = recorded("tensors")
    for scale in (1.0, 1024.0):
        model, optimizer = build()
        other, scaler = nn.Linear(16, 1), torch.amp.GradScaler("cpu", init_scale=64.0)
        own = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
        with tt.check(model, reference, optimizer=optimizer, isolate=isolate) as check:
            for seed in range(2):
                x = torch.randn(24, 16, generator=torch.Generator().manual_seed(seed))
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), torch.arange(24) % 4)
                other_loss = other(x).square().mean()
                if order == "before":
                    scaler.scale(other_loss).backward()
                losses = own.scale([loss])
                if order == "between":
                    losses.append(scaler.scale(other_loss))
                for each in losses:
                    each.backward()
                if order == "after":
                    scaler.scale(other_loss).backward()
                own.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                own.step(optimizer)
                own.update()
        assert check.result.verdict == "match", check.result.sentence


def test_a_check_says_that_the_scale_of_the_reference_is_not_known() -> None:
    model, optimizer = build()
    with tt.capture(model, keep="tensors", kinds=KINDS[:-1]) as tap:
        train(model, optimizer, 1.0)
    found = checked(tap.run, 1024.0)
    assert any("a scaler multiplies the loss by 1024, and the reference" in note for note in found.notes), found.notes


class PaddleScaler(paddle.amp.GradScaler):  # type: ignore[misc]  # paddle has no types
    """Works on the host, where paddle's own is never enabled."""

    def __init__(self, scale: float) -> None:
        super().__init__(enable=False)
        self._enable, self._scale, self._use_dynamic_loss_scaling = True, paddle.to_tensor([scale]), False
        self._optimizer_states: Any = defaultdict(lambda: {"state": paddle.amp.grad_scaler.OptimizerState.INIT})

    def _unscale(self, optimizer: Any) -> None:
        for parameter in optimizer._parameter_list:
            parameter.grad.set_value(parameter.grad / self._scale)
        self._found_inf = False


def paddle_train(model: Any, optimizer: Any, scale: float) -> None:
    scaler = paddle.amp.GradScaler(enable=False) if scale == 1 else PaddleScaler(scale)
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal((24, 16), np.float32))
    scaler.scale((model(x) ** 2).mean()).backward()
    scaler.step(optimizer)
    optimizer.clear_grad()


@pytest.mark.parametrize("scales", [(1.0, 512.0), (512.0, 1.0)])
def test_a_check_of_a_paddle_model_knows_its_scaler(scales: tuple[float, float]) -> None:
    def new() -> tuple[Any, Any]:
        paddle.seed(0)
        model = paddle.nn.Sequential(paddle.nn.Linear(16, 8), paddle.nn.LayerNorm(8), paddle.nn.Linear(8, 4))
        return model, paddle.optimizer.SGD(0.1, parameters=model.parameters())

    model, optimizer = new()
    kinds = tuple(kind for kind in KINDS if kind != "grad_input")
    with tt.capture(model, keep="tensors", kinds=kinds, optimizer=optimizer) as tap:
        paddle_train(model, optimizer, scales[0])
    model, optimizer = new()
    with tt.check(model, tap.run, optimizer=optimizer) as check:
        paddle_train(model, optimizer, scales[1])
    assert check.result.verdict == "match", check.result.sentence


@_KEEP
@pytest.mark.parametrize("scales", [(1.0, 512.0), (512.0, 64.0)])
def test_scaled_gradients_of_two_frameworks_are_compared_at_one_scale(keep: str, scales: tuple[float, float]) -> None:
    torch_model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    layers = paddle.nn.Linear(16, 8), paddle.nn.LayerNorm(8), paddle.nn.Linear(8, 4)
    paddle_model = paddle.nn.Sequential(*layers)
    tt.transfer(torch_model, paddle_model)
    kinds = tuple(kind for kind in KINDS if kind != "grad_input")
    torch_optimizer = torch.optim.SGD(torch_model.parameters(), lr=0.1)
    with tt.capture(torch_model, keep=keep, kinds=kinds, optimizer=torch_optimizer) as reference:
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], enabled=scales[0] != 1)
        x = torch.from_numpy(np.random.default_rng(0).standard_normal((24, 16), np.float32))
        scaler.scale((torch_model(x) ** 2).mean()).backward()
        scaler.step(torch_optimizer)
    paddle_optimizer = paddle.optimizer.SGD(0.1, parameters=paddle_model.parameters())
    with tt.capture(paddle_model, keep=keep, kinds=kinds, optimizer=paddle_optimizer) as candidate:
        paddle_train(paddle_model, paddle_optimizer, scales[1])
    for sides in (reference.run, candidate.run), (candidate.run, reference.run):
        found = tt.compare(*sides)
        assert found.verdict == "match", found.sentence

"""Mistakes in what a loop does to parameters within a step, and to modules that come later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.compare.judge.rules.unseen import MOVED_WITHIN_STEP


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def trained(loop: Callable[[nn.Sequential, Any], None], optimizer: Callable[[nn.Module], Any], **options: Any) -> Any:
    model = net()
    made = optimizer(model)
    with tt.capture(model, optimizer=made, **options) as tap:
        loop(model, made)
    return tap.run


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()


def test_a_setting_that_acts_within_a_step_is_named() -> None:
    """The parameters are recorded before and after a step; LBFGS moves them in between."""

    def loop(model: nn.Sequential, optimizer: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = model(torch.ones(3, 4)).square().sum()
            value.backward()
            return value

        optimizer.step(closure)

    def lbfgs(rate: float) -> Callable[[nn.Module], Any]:
        return lambda model: torch.optim.LBFGS(model.parameters(), lr=rate, max_iter=3)

    right, wrong = (trained(loop, lbfgs(rate)) for rate in (0.01, 0.02))
    result = tt.compare(right, wrong)
    assert result.first.key.micro == 1
    assert "lr is 0.01 in the reference and 0.02 in the candidate" in result.sentence
    assert "Its parameters changed within the step" in result.sentence


def test_noise_of_gradients_moves_parameters_within_a_step() -> None:
    """What LBFGS makes of it before the next forward shows after the step."""

    def noisy(gradient: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, gradient.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
        return gradient * (1 + 2.0**-18 * signs)

    def loop(model: nn.Sequential, optimizer: Any, noise: bool, mistake: float = 1.0) -> None:
        for parameter in model.parameters() if noise else ():
            parameter.register_hook(noisy)
        x, calls = torch.randn(8, 4, generator=torch.Generator().manual_seed(2)), 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            value = ((model(x) * (mistake if calls > 1 else 1.0) - x[:, :2]) ** 2).sum()
            value.backward()
            return value

        optimizer.step(closure)

    def lbfgs(model: nn.Module) -> Any:
        return torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=12)

    right = trained(partial(loop, noise=False), lbfgs)
    found = tt.compare(right, trained(partial(loop, noise=True), lbfgs))
    assert found.verdict == "match", found.sentence
    assert any(row["rule"] == MOVED_WITHIN_STEP for row in found.rows)
    wrong = tt.compare(right, trained(partial(loop, noise=True, mistake=1.01), lbfgs))
    assert wrong.first is not None, wrong.sentence


def test_accumulated_gradients_change_no_parameter_within_a_step() -> None:
    def loop(model: nn.Sequential, optimizer: Any) -> None:
        for _ in range(2):
            model(torch.ones(3, 4)).square().sum().backward()
            step(model, optimizer)

    assert "moved" not in trained(loop, sgd).loop().names()


class Scaled(nn.Linear):
    def __init__(self, scale: float) -> None:
        super().__init__(2, 2)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_attributes_of_a_module_that_replaces_another() -> None:
    def loop(model: nn.Sequential, optimizer: Any, scale: float) -> None:
        model.append(nn.Linear(2, 2))
        step(model, optimizer)
        model[5] = Scaled(scale)
        step(model, optimizer)

    right, wrong = (trained(lambda *given, scale=scale: loop(*given, scale), sgd) for scale in (1.0, 2.0))
    result = tt.compare(right, wrong)
    assert result.first.key.step == 1 and "Its scale is 2.0 instead of 1.0" in result.sentence


@pytest.mark.filterwarnings("ignore::UserWarning:paddle", "ignore::DeprecationWarning")
def test_clipping_inside_the_optimizer_is_named() -> None:
    paddle = pytest.importorskip("paddle")

    def run(clip: Any) -> Any:
        paddle.seed(0)
        model = paddle.nn.Linear(4, 2)
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters(), grad_clip=clip)
        with tt.capture(model, optimizer=optimizer) as tap:
            model(paddle.ones([3, 4])).sum().backward()
            optimizer.step()
        return tap.run

    said = tt.compare(run(paddle.nn.ClipGradByGlobalNorm(0.1)), run(None)).sentence
    assert "the optimizer's clipping is ClipGradByGlobalNorm" in said and "and none in the candidate" in said


def test_attributes_and_parameters_of_a_module_that_comes_later() -> None:
    def loop(model: nn.Sequential, optimizer: Any, scale: float, decay: float) -> None:
        step(model, optimizer)
        model.append(Scaled(scale))
        optimizer.add_param_group({"params": model[5].parameters(), "weight_decay": decay})
        step(model, optimizer)

    right, scaled, decayed = (
        trained(lambda *given, way=way: loop(*given, *way), sgd) for way in ((1.0, 0.0), (2.0, 0.0), (1.0, 0.5))
    )
    assert "part in 5 (Scaled)" in (said := tt.compare(right, scaled).sentence) and "Its scale is 2.0" in said
    assert right.loop().value("parameters", 1, "0.1")["names"] == ["5.weight", "5.bias"]
    assert "weight decay applies to 2 parameters" in tt.compare(right, decayed).sentence


@pytest.mark.filterwarnings("ignore::UserWarning:paddle", "ignore::DeprecationWarning")
@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_clipping_before_and_inside_the_optimizer_is_the_same(keep: str) -> None:
    """Paddle's optimizers clip by themselves, after their gradients were recorded; in torch the loop does it before."""
    paddle = pytest.importorskip("paddle")
    ours = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def copied() -> Any:
        theirs = paddle.nn.Sequential(paddle.nn.Linear(4, 6), paddle.nn.Tanh(), paddle.nn.Linear(6, 2))
        tt.transfer(ours, theirs, strict=True)
        return theirs

    def run(theirs: Any, norm: float) -> Any:
        clip = paddle.nn.ClipGradByGlobalNorm(norm)
        optimizer = paddle.optimizer.SGD(0.1, parameters=theirs.parameters(), grad_clip=clip)
        with tt.capture(theirs, keep=keep, optimizer=optimizer) as tap:
            theirs(paddle.to_tensor(x.numpy())).square().sum().backward()
            optimizer.step()
        return tap.run

    models = copied(), copied()
    optimizer = sgd(ours)
    with tt.capture(ours, keep=keep, optimizer=optimizer) as tap:
        ours(x).square().sum().backward()
        nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
        optimizer.step()
    found = tt.compare(tap.run, run(models[0], 0.1))
    assert (found.verdict, found.first) == ("match", None), found.sentence
    wrong = tt.compare(tap.run, run(models[1], 0.3))
    assert wrong.verdict == "diverged", wrong.sentence

"""Several models in one tap or check, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import pytest
import torch

import tensortap as tt
from tensortap.errors import UsageError


class Gan:
    """A generator and a critic, in either framework. The critic sees real and made values in one backward."""

    def __init__(self, name: str, slope: float = 1.0) -> None:
        self.lib: Any = torch if name == "torch" else paddle
        torch.manual_seed(0), paddle.seed(0)
        kit = self.lib.nn
        self.models = {"type": kit.Sequential(kit.Linear(2, 2), kit.Tanh()), "critic": kit.Linear(2, 1)}
        self.slope = slope
        rates = {"lr": 0.1} if name == "torch" else {"learning_rate": 0.1}
        optimizer = self.lib.optim.SGD if name == "torch" else self.lib.optimizer.SGD
        self.optimizers = [
            optimizer(parameters, **rates) if name == "torch" else optimizer(parameters=parameters, **rates)
            for parameters in (each.parameters() for each in self.models.values())
        ]

    def clear(self) -> None:
        for each in self.optimizers:
            each.zero_grad() if self.lib is torch else each.clear_grad()

    def step(self) -> None:
        generator, critic = self.models.values()
        made = generator(self.lib.ones([3, 2]))
        (critic(self.lib.zeros([3, 2])) - self.slope * critic(made.detach())).square().sum().backward()
        self.optimizers[1].step()
        self.clear()
        critic(made).sum().backward()
        self.optimizers[0].step()
        self.clear()

    def parameters(self) -> list[bytes]:
        return [each.detach().numpy().tobytes() for model in self.models.values() for each in model.parameters()]


def captured(name: str, slope: float = 1.0) -> tuple[Any, Gan]:
    gan = Gan(name, slope)
    with tt.capture(gan.models, optimizer=gan.optimizers, keep="tensors", on_error="raise") as tap:
        for _ in range(3):
            gan.step()
    return tap, gan


@pytest.fixture(params=["torch", "paddle"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_names_steps_and_micro_steps(name: str) -> None:
    tap, gan = captured(name)
    run = tap.run
    assert run.steps == [0, 1, 2]
    assert {record.key.module for record in run} == {"type", "type.0", "type.1", "critic"}
    outputs = [(r.key.module, r.key.micro, r.key.call) for r in run.records(step=2, kind="output")]
    assert outputs[:3] == [("type.0", 0, 0), ("type.1", 0, 0), ("type", 0, 0)]
    assert outputs[3:] == [("critic", 0, 0), ("critic", 0, 1), ("critic", 1, 0)]
    gradients = {(r.key.module, r.key.path, r.key.micro) for r in run.records(step=2, kind="param_grad")}
    assert gradients == {
        *(("type.0", path, 0) for path in ("weight", "bias")),
        *(("critic", path, micro) for path in ("weight", "bias") for micro in (0, 1)),
    }
    assert run.loop().value("parameters", 0, "0.0") == {"names": ["type.0.weight", "type.0.bias"], "others": 0}
    statuses = {row.module: row.status for row in tap.coverage}
    assert statuses["type"] == statuses["critic"] == "seen" and run.info["model"] == "Models"
    untapped = Gan(name)
    for _ in range(3):
        untapped.step()
    assert untapped.parameters() == gan.parameters(), "the training is the same"


def test_comparisons_name_the_model(name: str) -> None:
    tap, _ = captured(name)
    assert tt.compare(tap.run, captured(name)[0].run).verdict == "match"
    other = tt.compare(tap.run, captured(name, slope=1.01)[0].run)
    assert other.verdict == "diverged" and other.first is not None and other.first.module == "critic"
    assert other.first.key.step == 0 and other.first.key.phase == "backward"


@pytest.mark.parametrize("isolate", [True, False])
def test_a_check_names_the_model(name: str, isolate: bool) -> None:
    tap, _ = captured(name)
    for slope in (1.0, 1.01):
        gan = Gan(name, slope)
        with tt.check(gan.models, tap.run, optimizer=gan.optimizers, isolate=isolate) as check:
            for _ in range(3):
                gan.step()
        result = check.result
        assert (result.verdict == "match") == (slope == 1.0), result.sentence
        assert slope == 1.0 or (result.first is not None and result.first.module == "critic"), result.sentence


def test_the_noise_of_several_models(tmp_path: Path) -> None:
    tap, _ = captured("torch")
    gan = Gan("torch")
    critic = gan.models["critic"]
    noise = tt.noise(
        gan.models, lambda models: critic(models["type"](torch.ones(3, 2))).sum().backward(), tmp_path / "n"
    )
    with tt.check(gan.models, tap.run, optimizer=gan.optimizers, noise=noise) as check:
        gan.step()
    assert check.result.verdict == "match", check.result.sentence
    with pytest.raises(UsageError, match="no common batch"):
        tt.noise(gan.models, torch.ones(3, 2), tmp_path / "other")


def test_evaluation_of_one_model_is_not_training() -> None:
    gan = Gan("torch")
    with tt.capture(gan.models, optimizer=gan.optimizers, on_error="raise") as tap:
        for _ in range(2):
            gan.step()
            with torch.no_grad():
                gan.models["type"].eval()(torch.ones(1, 2))
                gan.models["type"].train()
    assert tap.run.steps == [0, 1] and len(list(tap.run.records(module="type", kind="output"))) == 2


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (lambda net: [net, net], r'by name: give \{"generator"'),
        (lambda net: {}, "models is empty"),
        (lambda net: {"a.b": net}, "text without dots"),
        (lambda net: {3: net}, "3 cannot be the name"),
        (lambda net: {"a": net, "b": paddle.nn.Linear(2, 2)}, "several frameworks"),
        (lambda net: {"a": object()}, "is not a model"),
    ],
)
def test_what_is_refused(models: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tt.capture(models(torch.nn.Linear(2, 2)))

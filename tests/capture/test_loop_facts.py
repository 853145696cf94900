"""What a loop does beside tensors is recorded: each fact where it changes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import torch
from torch import nn

import tensortap as tt
from support import fake_gpu
from tensortap.errors import UsageError
from tensortap.frameworks.torch.framework import Torch
from tensortap.frameworks.torch.ops_reader import OpsReader


class PaddleScaler(paddle.amp.GradScaler):  # type: ignore[misc]  # paddle has no types
    """Works on the host, where paddle's own does nothing."""

    def turn_on(self) -> None:
        self._enable = self._use_dynamic_loss_scaling = True
        self._scale, self._optimizer_states = paddle.to_tensor([4.0]), defaultdict(_ready)

    def scale(self, loss: Any) -> Any:
        return loss * self._scale if self._enable else loss

    def _unscale(self, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in optimizer._parameter_list]
        self._found_inf = any(bool(paddle.isinf(each).any() | paddle.isnan(each).any()) for each in gradients)
        for each in gradients:
            each.set_value(each / self._scale)

    def update(self) -> None:
        if self._enable:
            self._optimizer_states.clear()
            if self._found_inf:
                self._scale = self._scale / 2


def _ready() -> dict[str, Any]:
    return {"state": paddle.amp.grad_scaler.OptimizerState.INIT}


class Loop:
    """A small training in either framework."""

    def __init__(self, name: str, rate: float = 0.5) -> None:
        self.name, self.lib = name, torch if name == "torch" else paddle
        self.seed(1)
        kit: Any = torch.nn if name == "torch" else paddle.nn
        self.model: Any = kit.Sequential(kit.Linear(3, 3), kit.Dropout(0.5), kit.LayerNorm(3))
        if name == "torch":
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9)
            self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)
        else:
            self.optimizer = paddle.optimizer.Momentum(rate, 0.9, self.model.parameters())
            self.scaler = PaddleScaler(enable=False)

    def seed(self, number: int) -> None:
        torch.manual_seed(number) if self.name == "torch" else paddle.seed(number)

    def backward(self, scale: float = 1.0) -> Any:
        loss = (self.model(self.lib.ones([2, 3])).square() * self.lib.arange(3.0)).sum() * scale
        loss.backward()
        return loss

    def clear(self) -> None:
        self.optimizer.zero_grad() if self.name == "torch" else self.optimizer.clear_grad()

    def set_rate(self, rate: float) -> None:
        if self.name == "torch":
            self.optimizer.param_groups[0]["lr"] = rate
        else:
            self.optimizer.set_lr(rate)

    def halve_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad.mul_(0.5) if self.name == "torch" else parameter.grad.set_value(parameter.grad * 0.5)

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.clear()


@pytest.fixture(params=["torch", "paddle"])
def loop(request: pytest.FixtureRequest) -> Loop:
    return Loop(request.param)


@pytest.fixture
def torch_loop() -> Iterator[Loop]:
    yield Loop("torch")


def kinds_of(run: Any, step: int) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = {}
    for record in run.records(step=step, phase="state"):
        found.setdefault(record.key.kind, []).append((f"{record.key.module}.{record.key.path}", record.key.call))
    return found


NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_settings_are_those_that_the_step_used(loop: Loop) -> None:
    with tt.capture(loop.model, optimizer=loop.optimizer, on_error="raise") as tap:
        for step in range(4):
            loop.step()
            if step == 1:
                loop.set_rate(0.25)
    facts = tap.run.loop()
    assert [(change.step, change.value["lr"]) for change in facts.changes("group", "0.0")] == [(0, 0.5), (2, 0.25)]
    settings = facts.value("group", 3, "0.0") or {}
    assert settings["momentum"] == 0.9 and settings["nesterov"] is False
    name = "SGD" if loop.name == "torch" else "Momentum"
    assert facts.value("optimizer", 0, "0") == {"class": name, "groups": 1}
    assert facts.value("parameters", 3, "0.0") == {"names": NAMES, "others": 0}
    assert facts.value("skipped", 3, "0") == {"skipped": False}
    assert len(facts.changes("parameters", "0.0")) == len(facts.changes("skipped", "0")) == 1
    assert facts.value("world", 0) == {"size": 1}


def test_random_states_at_the_start_of_each_step(loop: Loop) -> None:
    def digests(draws: int) -> dict[str, list[tuple[int, Any]]]:
        loop.seed(5), random.seed(5), np.random.seed(5)
        with tt.capture(loop.model, kinds="output") as tap:
            for step in range(3):
                loop.backward()
                if step == 1:
                    for _ in range(draws):
                        random.random(), np.random.random()
                tap.step()
        facts = tap.run.loop()
        changes = {of: facts.changes("random", of) for of in facts.subjects("random")}
        return {of: [(each.step, each.value["digest"]) for each in found] for of, found in changes.items()}

    first = digests(0)
    assert first == digests(0) and set(first) == {f"{loop.name}.cpu", "python", "numpy"}
    assert [step for step, _ in first[f"{loop.name}.cpu"]] == [0, 1, 2], "dropout draws in each step"
    assert [step for step, _ in first["python"]] == [step for step, _ in first["numpy"]] == [0]
    other = digests(1)
    assert [step for step, _ in other["python"]] == [step for step, _ in other["numpy"]] == [0, 2]


def test_the_training_is_the_same_with_and_without(loop: Loop) -> None:
    def trained(tapped: bool) -> list[bytes]:
        again = Loop(loop.name)
        tap = tt.capture(again.model, optimizer=again.optimizer, on_error="raise") if tapped else None
        for _ in range(3):
            again.backward()
            again.backward()
            again.halve_gradients()
            again.optimizer.step()
            again.clear()
        if tap is not None:
            tap.close()
        return [parameter.detach().numpy().tobytes() for parameter in again.model.parameters()]

    assert trained(True) == trained(False)


def test_attributes_once_and_where_they_change(loop: Loop) -> None:
    class Config:
        def __init__(self) -> None:
            self.heads, self.kind, self.model = 2, "gelu", loop.model

        @property
        def trap(self) -> Any:
            raise RuntimeError("a property must not be called")

    loop.model.config = loop.model[0].config = Config()
    with tt.capture(loop.model, optimizer=loop.optimizer, on_error="raise") as tap:
        for step in range(3):
            loop.step()
            if step == 0:
                loop.model[1].p = 0.25
            if step == 1:
                loop.model.config.heads = 4
                loop.model[2].eval()
    facts = tap.run.loop()
    assert facts.subjects("attributes") == ["", "0", "1", "2"]
    assert [(each.step, each.value["p"]) for each in facts.changes("attributes", "1")] == [(0, 0.5), (1, 0.25)]
    heads = [(each.step, each.value["config.heads"]) for each in facts.changes("attributes", "")]
    assert heads == [(0, 2), (2, 4)] and "config.model" not in (facts.value("attributes", 0, "") or {})
    assert [each.value["training"] for each in facts.changes("attributes", "2")] == [True, False]
    assert "config.heads" not in (facts.value("attributes", 0, "0") or {}), "once for each config"
    eps = {"torch": "eps", "paddle": "_epsilon"}[loop.name]
    assert (facts.value("attributes", 0, "2") or {})[eps] == 1e-5


def test_ties(loop: Loop) -> None:
    loop.model[2].weight = loop.model[0].bias
    model = (nn.ModuleDict if loop.name == "torch" else paddle.nn.LayerDict)({"a": loop.model, "b": loop.model[0]})
    with tt.capture(model, kinds="output") as tap:
        model["a"](loop.lib.ones([2, 3]))
    assert tap.run.loop().value("ties", 0) == {
        "a.2.weight": "a.0.bias",
        "b.weight": "a.0.weight",
        "b.bias": "a.0.bias",
    }


def test_no_ties_is_known(loop: Loop) -> None:
    with tt.capture(loop.model, kinds="output") as tap:
        loop.backward()
    assert tap.run.loop().value("ties", 0) == {}


def test_parameters_after_each_step_and_gradients_that_differ(loop: Loop) -> None:
    with tt.capture(loop.model, optimizer=loop.optimizer, keep="tensors", on_error="raise") as tap:
        for step in range(4):
            loop.backward()
            if step in (1, 3):
                loop.halve_gradients()
            if step == 2:
                loop.backward()
            loop.optimizer.step()
            loop.clear()
    run = tap.run
    assert [call for _, call in kinds_of(run, 0)["param"]] == [0] * 4 + [1] * 4, "before the first step, too"
    assert "step_grad" not in kinds_of(run, 0), "equal to param_grad"
    for step in (1, 2, 3):
        assert kinds_of(run, step) == {
            "step_grad": [(name, 0) for name in NAMES],
            "param": [(name, 1) for name in NAMES],
        }
        for record in run.records(step=step, kind="step_grad"):
            key = record.key
            found = [run.load(r) for r in run.records(step=step, kind="param_grad", module=key.module, path=key.path)]
            expected = sum(found) if step == 2 else 0.5 * found[0]
            assert len(found) == 1 + (step == 2) and np.array_equal(run.load(record), expected)
    facts = run.loop().changes("step_grad", "0")
    assert [(each.step, each.value) for each in facts] == [(0, {"absent": "equal to param_grad", "no_gradient": []})]
    assert tt.compare(run, run).verdict == "match"


def test_gradients_that_are_not_cleared(loop: Loop) -> None:
    loop.model[0].weight.stop_gradient = True
    if loop.name == "torch":
        loop.model[0].weight.requires_grad_(False)
    with tt.capture(loop.model, optimizer=loop.optimizer, on_error="raise") as tap:
        for _ in range(2):
            loop.backward()
            loop.optimizer.step()
    assert "step_grad" not in kinds_of(tap.run, 0)
    assert [name for name, _ in kinds_of(tap.run, 1)["step_grad"]] == NAMES[1:]
    assert (tap.run.loop().value("step_grad", 1, "0") or {})["no_gradient"] == ["0.weight"]


def test_parameters_before_a_step_that_follows_an_unrecorded_one(loop: Loop) -> None:
    with tt.capture(loop.model, optimizer=loop.optimizer, steps=[0, 1, 3]) as tap:
        for _ in range(4):
            loop.step()
    calls = {step: {call for _, call in kinds_of(tap.run, step)["param"]} for step in (0, 1, 3)}
    assert calls == {0: {0, 1}, 1: {1}, 3: {0, 1}}
    assert tap.run.info["config"]["kinds"][-2:] == ["step_grad", "param"]


def test_every_gradient_is_recorded_without_param_grad(loop: Loop) -> None:
    with tt.capture(loop.model, optimizer=loop.optimizer, kinds="step_grad") as tap:
        loop.step()
    assert [name for name, _ in kinds_of(tap.run, 0)["step_grad"]] == NAMES
    assert (tap.run.loop().value("step_grad", 0, "0") or {})["absent"] == "no gradient"


def test_an_optimizer_of_another_copy_of_the_model_is_reported() -> None:
    ours, other = Loop("torch"), Loop("torch")
    with tt.capture(ours.model, optimizer=other.optimizer) as tap:
        ours.backward()
        other.optimizer.step()
    expected = "rank 0: optimizer 0 holds no parameter of the model: the gradients that it uses were not recorded"
    assert tap.run.notices == [expected]
    with tt.capture(ours.model, optimizer=ours.optimizer) as tap:
        ours.step()
    assert tap.run.notices == []


def test_step_grad_needs_an_optimizer(torch_loop: Loop) -> None:
    with pytest.raises(UsageError, match=r"step_grad .* pass optimizer="):
        tt.capture(torch_loop.model, kinds=("output", "step_grad"))


@pytest.mark.parametrize("device", ["operations", "lanes"])
def test_the_same_on_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    def train(path: Path) -> Any:
        loop = Loop("torch")
        with tt.capture(loop.model, path, optimizer=loop.optimizer, keep={"0": "tensors"}, on_error="raise") as tap:
            for step in range(6):
                loop.backward()
                if step % 3 == 1:
                    loop.halve_gradients()
                elif step % 3 == 2:
                    for parameter in loop.model.parameters():
                        parameter.grad = parameter.grad.clone()
                loop.optimizer.step()
                loop.clear()
        return {record.key: (record.summary.digest, record.location is None) for record in tap.run}

    here, reader = train(tmp_path / "here"), OpsReader()
    if device == "operations":
        monkeypatch.setattr(Torch, "device_reader", lambda self, tensor: reader)
    else:
        fake_gpu.install(monkeypatch)()
    there = train(tmp_path / "there")
    assert there == here
    assert {key.step for key in here if key.kind == "step_grad"} == {1, 4}


def test_frozen_parameters_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, optimizer=sgd) as tap:
        for step in range(3):
            model[0].weight.requires_grad_(step < 2)
            model(torch.ones(2, 3)).square().sum().backward()
            sgd.step()
            sgd.zero_grad()
    facts = tap.run.loop()
    assert facts.value("buffers", 0) == {"names": ["1.running_mean", "1.running_var", "1.num_batches_tracked"]}
    assert [(each.step, each.value["names"]) for each in facts.changes("frozen", "")] == [
        (0, ["0.bias"]),
        (2, ["0.weight", "0.bias"]),
    ]


def test_a_parameter_that_is_released_later() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    with tt.capture(model, kinds="output") as tap:
        for step in range(3):
            model[0].weight.requires_grad_(step > 0)
            model(torch.ones(2, 3)).square().sum().backward()
            tap.step()
    changes = tap.run.loop().changes("frozen", "")
    assert [(each.step, each.value["names"]) for each in changes] == [(0, ["0.weight", "0.bias"]), (1, ["0.bias"])]

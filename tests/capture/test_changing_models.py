"""Modules that are added, replaced or removed while tapped are seen from then on, and the coverage says so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import ALL_KINDS, coverage, hooks_on


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Adapted(nn.Module):
    """A linear layer with an adapter beside it, as of LoRA."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def by_item(model: nn.Sequential) -> None:
    model[2] = nn.Linear(4, 4)


def by_attribute(model: nn.Sequential) -> None:
    setattr(model, "2", nn.Linear(4, 4))


def behind_its_back(model: nn.Sequential) -> None:
    model._modules["2"] = nn.Linear(4, 4)


def step(model: nn.Module, optimizer: Any = None) -> None:
    model(torch.ones(2, 4)).square().sum().backward()


@pytest.mark.parametrize("replace", [by_item, by_attribute])
def test_a_replaced_module_is_seen_from_its_next_call(replace: Callable[[Any], None]) -> None:
    model = net()
    with tt.capture(model, kinds=ALL_KINDS) as tap:
        step(model), tap.step()
        old = model[2]
        replace(model)
        step(model), tap.step()
    assert not hooks_on(old) and not hooks_on(model)
    kinds = {record.key.kind for record in tap.run.records(step=1, module="2")}
    assert kinds == {"input", "output", "grad_input", "grad_output", "param", "param_grad"}
    assert coverage(tap)["2"] == ("seen", "replaced at step 1")


def test_a_module_replaced_behind_its_back_is_seen_from_the_next_step() -> None:
    model = net()
    with tt.capture(model, kinds="output") as tap:
        for _ in range(3):
            step(model), tap.step()
            if tap._clock.step == 1:
                behind_its_back(model)
    assert {record.key.step for record in tap.run.records(module="2")} == {0, 2}
    assert coverage(tap)["2"] == ("seen", "replaced at step 2")


def test_modules_between_two_micro_steps() -> None:
    model = net()
    with tt.capture(model, kinds=("output", "param", "param_grad")) as tap:
        step(model)
        model.append(nn.Linear(4, 2))
        step(model)
    assert {r.key.micro for r in tap.run.records(module="3", kind=("output", "param_grad"))} == {1}
    assert {r.key.call for r in tap.run.records(module="3", kind="param")} == {0, 1}
    assert coverage(tap)["3"] == ("seen", "added at step 0")


def test_an_adapter_around_a_tapped_module() -> None:
    model = net()
    with tt.capture(model, kinds="output") as tap:
        step(model), tap.step()
        model[2] = Adapted(model[2])
        step(model), tap.step()
    after = {record.key.module for record in tap.run.records(step=1)}
    assert after == {"", "0", "1", "2", "2.base", "2.adapter"}


def test_a_removed_module() -> None:
    model = net()
    with tt.capture(model, kinds="output") as tap:
        step(model), tap.step()
        del model[2]
        step(model), tap.step()
        step(model), tap.step()
    assert coverage(tap)["2"] == ("seen", "removed at step 2")


def test_the_selection_applies_to_new_modules() -> None:
    model = net()
    with tt.capture(model, kinds="output", classes="Linear") as tap:
        step(model), tap.step()
        model.append(nn.Linear(4, 4)), model.append(nn.Tanh())
        step(model)
    assert {record.key.module for record in tap.run.records(step=1)} == {"0", "2", "3"}


def test_lazy_modules_have_their_first_gradients_and_their_class() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyBatchNorm1d(), nn.Linear(4, 2))
    with tt.capture(model) as tap:
        for _ in range(2):
            step(model), tap.step()
    gradients = [(r.key.step, r.key.module) for r in tap.run.records(kind="param_grad")]
    assert {place for place in gradients if place[1] in "02"} == {(s, m) for s in (0, 1) for m in ("0", "2")}
    assert [row.cls for row in tap.coverage] == ["Sequential", "Linear", "ReLU", "BatchNorm1d", "Linear"]


def test_two_runs_with_the_same_change_match_and_a_planted_mistake_is_named() -> None:
    runs = []
    for scale in (1.0, 1.0, 1.01):
        model = net()
        with tt.capture(model, kinds=("input", "output"), keep="tensors") as tap:
            for number in range(2):
                if number:
                    torch.manual_seed(1)
                    model[2] = nn.Linear(4, 3)
                    model[2].weight.data.mul_(scale)
                step(model), tap.step()
        runs.append(tap.run)
    assert tt.compare(runs[0], runs[1]).verdict == "match"
    first = tt.compare(runs[0], runs[2]).first
    assert first is not None and (first.key.step, first.module) == (1, "2")


def test_other_models_are_left_alone() -> None:
    model, other = net(), net()
    with tt.capture(model):
        step(model)
        other[2] = nn.Linear(4, 4)
        step(other)
        assert not hooks_on(other)


def test_training_is_unchanged() -> None:
    def train(tapped: bool) -> list[torch.Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tap = tt.capture(model, kinds=ALL_KINDS, optimizer=optimizer) if tapped else None
        for number in range(3):
            if number == 1:
                model.append(nn.Linear(4, 4))
                optimizer.add_param_group({"params": model[3].parameters()})
            step(model)
            optimizer.step()
        if tap is not None:
            tap.close()
        return list(model.parameters())

    assert all(map(torch.equal, train(False), train(True)))


def test_paddle() -> None:
    paddle = pytest.importorskip("paddle")
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.ReLU())
    with tt.capture(model, kinds="output") as tap:
        for number in range(3):
            model(paddle.ones([2, 4])).sum().backward()
            tap.step()
            if number == 0:
                model.add_sublayer("2", paddle.nn.Linear(4, 2))
    assert {record.key.step for record in tap.run.records(module="2")} == {1, 2}
    assert coverage(tap)["2"][1] == "added at step 1"


def test_a_tap_that_nobody_closes_does_not_hold_its_model() -> None:
    gc.collect()
    listening = set(torch.nn.modules.module._global_module_registration_hooks)
    model = net()
    tt.capture(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and torch.nn.modules.module._global_module_registration_hooks.keys() == listening
